"""Plans a step as calls of ops. A plan is made when groups, states or layouts change, and run at each step.

One call of the optimizer's op steps most parameters. There are further calls for parameters on another device, with
gaps between their elements, in float64, with amsgrad, or in memory that they share with others, and for shards whose
step needs a reduction over ranks. A parameter with gaps is copied to a buffer, stepped there and copied back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import _ops
from ..quant.layout import extent, is_dense
from ..reference.state import check_step
from ..schemas import AMSGRAD_STEP, MUON_STEP, StepArgs, StepOp
from . import step_errors, trust_bounds, weights
from .call import Call
from .checks import check_gradient
from .dtensor import calls as dtensor_calls
from .dtensor import collectives, shards
from .dtensor import muon as dtensor_muon
from .format import Format
from .muon_step import cut_into_buckets, muon_step
from .state import State, has_scales, state_args

Group = dict[str, Any]  # a parameter group of an optimizer


class Entry(NamedTuple):
    """One parameter of a step."""

    param: Tensor
    group: int  # the number of its group
    state: State
    op: StepOp  # that the group's options ask for


class Values(NamedTuple):
    """The values that are new at each step."""

    grads: Sequence[Tensor]
    hyperparameters: Callable[[StepOp], list[float]]  # an op's, of all groups
    max_grad_norm: float | None
    grad_scale: Tensor | None
    found_inf: Tensor | None
    # By parameter, the device of Muon's matrix products. Without an entry it is the parameter's own.
    product_devices: Mapping[Tensor, torch.device] | None = None


class Kind(NamedTuple):
    """What the parameters that one call steps have in common."""

    order: int  # its turn among parameters over the same memory (overlap_order)
    device: torch.device
    op: str
    by_reference: bool  # whether the plain PyTorch reference runs in place of a kernel
    cut: bool  # whether other ranks have parts of their blocks or layers
    reduced: bool  # whether ranks first reduce norms or largest values
    exchanged: bool  # whether they are Muon's matrices of which other ranks have parts
    has_gaps: bool  # between their elements in memory

    @classmethod
    def of(cls, entry: Entry, group: Group, order: int, ranks: shards.Ranks | None) -> Kind:
        """The kind of a parameter. ranks: those that have other elements of it."""
        p, op = entry.param, entry.op
        is_muon = op is MUON_STEP
        cut = ranks is not None and shards.needs_reference(p, group, has_scales(entry.state))
        reduced = not is_muon and ranks is not None and (cut or op.has_trust_ratios)
        by_reference = op is AMSGRAD_STEP or p.dtype == torch.float64 or (reduced and cut)
        # These matrices have a kind of their own, because their buckets must be the same on every rank.
        exchanged = is_muon and ranks is not None
        has_gaps = not p.is_contiguous() and not is_dense(p.shape, p.stride())
        return cls(order, p.device, op.name, by_reference, cut, reduced, exchanged, has_gaps)


class StepPlan:
    """The calls of a step of these parameters.

    Args:
        entries: the parameters that have a gradient, with their states.
        groups: the optimizer's.
        all_ranks: the ranks that have a part of the optimizer's parameters.
        overlaps: see :func:`overlap_order`.
        snapshots: of the groups (memkern.optim.replaced); a new object whenever they have changed.
        stage_of: returns the Stage (offload/device.py) that brings states from the host to a device, or None.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        groups: Sequence[Group],
        all_ranks: collectives.AllRanks,
        overlaps: Mapping[int, int],
        snapshots: Sequence[Any],
        stage_of: Callable[[torch.device], Any] = lambda device: None,
    ) -> None:
        self.all_ranks = all_ranks
        self.params = params = [entry.param for entry in entries]
        self._device = params[0].device if params else torch.device("cpu")  # of the gradients' norm and found_inf
        self.group_of_each = [entry.group for entry in entries]
        self._group_count, self._snapshots = len(groups), snapshots
        sharded = bool(all_ranks.meshes)
        ranks = shards.ranks_of_each(params) if sharded else {}
        self.ranks = [ranks.get(p) for p in params] if sharded else [None] * len(params)
        self.matrices = [i for i, entry in enumerate(entries) if entry.op is MUON_STEP]  # numbers of Muon's parameters
        self._norm: Tensor | None = None  # memory for the norm of all gradients
        self._rates: list[Tensor] = []  # memory for the groups' learning rates
        self._is_checked = False  # whether the ops' arguments were checked
        if not torch.compiler.is_compiling():
            self._param_ids, self._state_ids = [*map(id, params)], [id(entry.state) for entry in entries]
            self._overlaps, self._addresses = overlaps, _addresses(params)

        kinds: dict[Kind, list[int]] = {}
        for _, i in all_ranks.order.sorted(zip(params, range(len(params)), strict=True)):
            entry = entries[i]
            kind = Kind.of(entry, groups[entry.group], overlaps.get(id(entry.param), 0), self.ranks[i])
            kinds.setdefault(kind, []).append(i)
        self.exchanged: list[Call] = []  # of Muon's matrices that are sharded
        self.with_gaps: list[Call] = []  # each of one parameter with gaps
        # Calls before which ranks reduce values, in lists that reduce together: the calls of one op. With states on the
        # host each call reduces by itself, as its states are on the device only for its own step.
        reductions: dict[Any, list[Call]] = {}
        self.calls: list[Call] = []  # of all other parameters
        for kind, places in sorted(kinds.items(), key=lambda item: item[0].order):
            parts = [places]
            if kind.has_gaps or (kind.reduced and kind.by_reference):
                parts = [[i] for i in places]
            elif kind.op == MUON_STEP.name:
                # In buckets, as a step's updates take another 2 bytes per parameter while it runs.
                parts = [*cut_into_buckets(places, params, dtensor_muon.bytes_of_update)]
            stage = stage_of(kind.device)
            if stage is not None:
                # A bucket of matrices stays whole, as without offload: products of other batches have other bits.
                op, states = entries[places[0]].op, [entry.state for entry in entries]
                by_rows = not (op is MUON_STEP or op.has_trust_ratios or kind.cut or kind.has_gaps)
                parts = stage.cut_to_regions(parts, states, op is MUON_STEP, by_rows)
            calls = [self._call(entries, part, kind, groups, stage) for part in parts]
            if kind.has_gaps:
                self.with_gaps += calls
            elif kind.reduced:
                for call in calls:
                    reductions.setdefault(kind.op if stage is None else len(reductions), []).append(call)
            else:
                (self.exchanged if kind.exchanged else self.calls).extend(calls)
        self.reductions = [*reductions.values()]
        sharing = (*self.exchanged, *itertools.chain.from_iterable(self.reductions))
        self._exchanging = {ranks for call in sharing for ranks in call.ranks if ranks is not None}
        self.is_one_call = len(kinds) == len(self.calls) == 1

    def _call(
        self, entries: Sequence[Entry], places: list[int], kind: Kind, groups: Sequence[Group], stage: Any
    ) -> Call:
        """The call for the entries at ``places``."""
        op = entries[places[0]].op
        states = [entries[i].state for i in places]
        args = StepArgs(
            params=[entries[i].param for i in places],
            grads=(),
            **state_args(op, states),
            group=[entries[i].group for i in places],
            codec=[Format.of(g).codec_number for g in groups],
            block_size=[g["block_size"] for g in groups],
            weight_storage=[weights.storage_of(g) for g in groups],
        )
        ranks = [self.ranks[i] for i in places]
        takes_all = places == [*range(len(entries))]
        staged = None if stage is None else stage.staged(op, states)
        return Call(op, args, places, takes_all, ranks, kind.by_reference, kind.cut, [None] * len(places), staged)

    # ---- whether the plan still fits

    def still_fits(
        self,
        params: Sequence[Tensor],
        group_of_each: list[int],
        states: Sequence[Any],
        groups: Sequence[Group],
        snapshots: Sequence[Any],
    ) -> bool:
        """Whether the plan can be run for a step of ``params`` now. group_of_each: the number of each one's group.

        Compares neither values nor gradients, which may change. A state whose entry is replaced forgets its plan.
        """
        return (
            len(groups) == self._group_count
            and snapshots is self._snapshots
            and [*map(id, params)] == self._param_ids
            and [*map(id, states)] == self._state_ids
            and group_of_each == self.group_of_each
            and all(
                getattr(s, "plan", None) is self and s.is_as_stepped(p) for p, s in zip(params, states, strict=True)
            )
            and self._share_memory_as_planned(params)
        )

    def _share_memory_as_planned(self, params: Sequence[Tensor]) -> bool:
        """Whether parameters share memory as they did when the plan was made: ``.data`` ties weights at any time."""
        addresses = _addresses(params)
        if addresses == self._addresses:
            return True
        self._addresses = addresses
        return overlap_order(params) == self._overlaps

    # ---- the step

    def run(self, values: Values, groups: Sequence[Group], buffers: dict[Any, Tensor]) -> None:
        """Takes the step. ``buffers``: memory for parameters with gaps, kept from one step to the next.

        Raises:
            RuntimeError, TypeError, ValueError: gradients or states that an op does not take; before anything is
                changed.
        """
        if not self.is_one_call:  # the op of a single call checks the gradients itself before it changes anything
            for p, g in zip(self.params, values.grads, strict=True):
                check_gradient(p, g)
        if self._exchanging and not torch.compiler.is_compiling():
            collectives.check_order(self.all_ranks.order, self._exchanging)
        norm = self._grad_norm(values)
        if self.matrices or self.all_ranks.have_matrices:
            values = self._skipped_if_not_finite(values, norm)
        rates = self._learning_rates(groups)

        calls, exchanged, with_gaps, *reductions = [
            [filled for call in planned for filled in _filled(call, values, rates, norm)]
            for planned in (self.calls, self.exchanged, self.with_gaps, *self.reductions)
        ]
        if not (self.is_one_call or self._is_checked or torch.compiler.is_compiling()):
            # An op checks its own arguments before it changes anything, but an earlier op may have stepped by then.
            for call in (*calls, *exchanged):
                self._check(call, groups)
            for call in with_gaps:
                self._check(call, groups, [_buffer(buffers, call.args.params[0])])
            self._is_checked = True

        for call in calls:
            with _states_on_device(call):
                self._run(call, groups)
        if exchanged:
            dtensor_muon.step_buckets(exchanged, groups)
        for reduced in reductions:
            with _states_on_device(reduced[0]):
                dtensor_calls.step_with_reduction(reduced, groups)
        for call in with_gaps:
            (p,) = call.args.params
            dense = _buffer(buffers, p).copy_(p)
            with _states_on_device(call):
                self._run(call, groups, [dense])
            p.copy_(dense)

    def _op_args(self, call: Call, params: list[Tensor] | None) -> StepArgs:
        """The arguments as an op takes them. ``params``: buffers in place of parameters with gaps."""
        args = dtensor_calls.local_args(call.args) if self.all_ranks.meshes else call.args
        return args if params is None else args._replace(params=params)

    def _check(self, call: Call, groups: Sequence[Group], params: list[Tensor] | None = None) -> None:
        """Raises where the op would refuse its arguments. Gradients are not checked, as their strides may differ."""
        if call.cut:
            return
        args = self._op_args(call, params)
        try:
            have_values = call.staged is None  # step counters on a device, fake or still on the host, are not read
            steps = [
                t if have_values and t.is_cpu and type(t) is Tensor else torch.empty_like(t, device="meta")
                for t in args.steps
            ]
            check_step(call.op, args._replace(grads=args.params, steps=steps))
        except step_errors.OP_ERRORS as error:
            raise self._with_parameter_names(error, call, groups) from None

    def _run(self, call: Call, groups: Sequence[Group], params: list[Tensor] | None = None) -> None:
        """Calls the op. ``params``: buffers in place of parameters with gaps."""
        args = self._op_args(call, params)
        try:
            if call.op is MUON_STEP:
                muon_step(args, call.by_reference, groups, call.product_devices)
            elif call.op.has_trust_ratios and any(groups[number].get("trust_bounds") for number in {*args.group}):
                trust_bounds.step_(call.op, args, call.by_reference, groups)
            else:
                _ops.step_(call.op, args, call.by_reference)
        except step_errors.OP_ERRORS as error:
            if torch.compiler.is_compiling():
                raise
            raise self._with_parameter_names(error, call, groups) from None
        if self.all_ranks.meshes:
            torch.autograd.graph.increment_version(call.args.params)

    def _with_parameter_names(self, error: Exception, call: Call, groups: Sequence[Group]) -> Exception:
        """An op's error, about a parameter that the call has, or has some rows of, with the parameter's name."""
        params = [self.params[i] for i in call.places]
        return step_errors.with_parameter_names(error, call.args._replace(params=params), groups)

    # ---- numbers of a step

    def _learning_rates(self, groups: Sequence[Group]) -> list[Tensor]:
        """The groups' lr as tensors: their own, or the plan's, which are filled so that a step allocates nothing."""
        rates: Sequence[float | Tensor] = [group["lr"] for group in groups]
        if torch.compiler.is_compiling():
            # A product with a float that changes does not recompile; torch.full would, at each change.
            return [
                r if isinstance(r, Tensor) else torch.ones((), dtype=torch.float64, device="cpu") * r for r in rates
            ]
        if not self._rates:
            with torch.inference_mode(False):
                self._rates = [torch.zeros((), dtype=torch.float64, device="cpu") for _ in rates]
        return [r if isinstance(r, Tensor) else own.fill_(float(r)) for r, own in zip(rates, self._rates, strict=True)]

    def _grad_norm(self, values: Values) -> Tensor | None:
        """The norm of all gradients, fp64, for max_grad_norm; None without it."""
        if values.max_grad_norm is None:
            return None
        grads, device = values.grads, self._device
        scale = _on_device(values.grad_scale, device)
        if self.all_ranks.meshes:
            own = dtensor_calls.local_grads(grads, self.params)
            return collectives.grad_norm(own, scale, device, self.ranks, self.all_ranks)
        if torch.compiler.is_compiling():
            return collectives.norm_of(grads, scale, device)
        self._norm = collectives.norm_of(grads, scale, device, self._norm)  # so that a step allocates nothing
        return self._norm

    def _skipped_if_not_finite(self, values: Values, norm: Tensor | None) -> Values:
        """The values with a ``found_inf`` that skips the step, on all ranks, if a gradient of Muon's is not finite.

        Newton-Schulz iterations would carry a NaN to the whole matrix, and its momentum would keep it. Where gradients
        are clipped by their ``norm``, a NaN in any gradient would reach every matrix through the norm. So there the
        norm decides. Without a norm Muon's gradients are read once more, which takes 0.3 % of the time of a step of
        GPT-2's matrices on a CPU. The host does not wait for the device.
        """
        if norm is not None:
            finite = norm.isfinite()
        else:
            grads = values.grads
            if self.all_ranks.meshes:
                grads = dtensor_calls.local_grads(grads, self.params)
            finite = collectives.is_finite([grads[i] for i in self.matrices], self._device, self.all_ranks)
        found_inf = finite.logical_not().float()
        if values.found_inf is not None:
            found_inf = torch.maximum(found_inf, values.found_inf.to(found_inf).reshape(()))
        return values._replace(found_inf=found_inf)


def _filled(call: Call, values: Values, rates: list[Tensor], norm: Tensor | None) -> Iterator[Call]:
    """A planned call with the values of a step; where states come from the host, a call for each bucket of them."""
    device = call.args.params[0].device
    grads = values.grads
    args = call.args._replace(
        grads=grads if call.takes_all else [grads[i] for i in call.places],
        lr=rates,
        hyperparameters=values.hyperparameters(call.op),
        grad_scale=_on_device(values.grad_scale, device),
        found_inf=_on_device(values.found_inf, device),
        grad_norm=_on_device(norm, device),
        max_grad_norm=float(values.max_grad_norm or 0.0),
    )
    if (devices := values.product_devices) is not None:
        call = call._replace(product_devices=[devices.get(p) for p in args.params])
    if call.staged is None:
        yield call._replace(args=args)
    else:
        yield from (call._replace(args=staged.args(args), staged=staged) for staged in call.staged)


def _states_on_device(call: Call) -> AbstractContextManager[Any]:
    """A ``with`` block in which a call's states are on the device."""
    return nullcontext() if call.staged is None else call.staged.bucket.on_device()


def _on_device(x: Tensor | None, device: torch.device) -> Tensor | None:
    return None if x is None else x.to(device)


def _buffer(buffers: dict[Any, Tensor], p: Tensor) -> Tensor:
    """A tensor like p without gaps, in memory that all parameters of p's device and dtype share."""
    if torch.compiler.is_compiling():
        return torch.empty_like(p)
    key = p.device, p.dtype
    if key not in buffers or buffers[key].numel() < p.numel():
        with torch.inference_mode(False):
            buffers[key] = torch.empty(p.numel(), dtype=p.dtype, device=p.device)
    return buffers[key].as_strided(p.shape, torch.empty_like(p, device="meta").stride())


def _addresses(params: Sequence[Tensor]) -> list[int]:
    """The addresses of the parameters that have memory which others may share."""
    local = [p if type(p) is Parameter else shards.local(p) for p in params]  # shards.local takes .3 us
    return [x.data_ptr() for x in local if type(x) is Parameter or type(x) is Tensor]


def overlap_order(params: Sequence[Tensor]) -> dict[int, int]:
    """By a parameter's id: its turn, from 0, among parameters over the same memory. Empty where no two share any.

    An op steps its tensors at the same time. Tensors that share memory, tied by ``.data``, must be stepped one after
    another, as torch.optim steps them.
    """
    spans = []  # addresses of the first byte and of the byte after the last, and the parameter's index
    for i, p in enumerate(params):
        x = shards.local(p)
        if type(x) in (Tensor, Parameter) and not x.is_meta and x.numel():
            nbytes = extent(x.shape, x.stride()) * x.element_size()
            spans.append((x.data_ptr(), x.data_ptr() + nbytes, i))
    spans.sort()
    ends = [0, *itertools.accumulate((end for _, end, _ in spans), max)]
    if all(start >= before for (start, _, _), before in zip(spans, ends, strict=False)):
        return {}
    order: dict[int, int] = {}
    earlier: list[tuple[int, int, int]] = []
    for start, end, i in sorted(spans, key=itemgetter(2)):
        turns = [order[id(params[k])] for first, last, k in earlier if first < end and start < last]
        order[id(params[i])] = 1 + max(turns, default=-1)
        earlier.append((start, end, i))
    return order
