"""A step in several calls of ops: for several devices, and for parameters that the optimizer's own op does not take.

A parameter with gaps between its elements is copied to a buffer, stepped there and copied back. As in a step of one
call, the caller has checked everything before anything is changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _ops
from ..quant.codec import CODECS, POWER4
from ..quant.layout import extent, is_dense
from ..reference.state import check_step
from ..schemas import AMSGRAD_STEP, MUON_STEP, StepArgs, StepOp
from . import step_errors, weights
from .dtensor import collectives, shards
from .dtensor import muon as dtensor_muon
from .dtensor import step as dtensor_step
from .dtensor.step import Call
from .format import takes_8bit_state
from .muon_step import buckets, muon_step
from .state import state_keys
from .step_args import scaler_on, state_args

Group = dict[str, Any]


class Entry(NamedTuple):
    """One parameter of a step."""

    param: Tensor
    group: Group
    state: dict[str, Tensor]
    op: StepOp  # which the group's options ask for
    product_device: torch.device | None = None  # of Muon's matrix products, where not the parameter's


def is_needed(group: Group, params: Sequence[Tensor]) -> bool:
    """Whether one call of the optimizer's op does not take all ``params``, which are the group's."""
    return (
        bool(group.get("amsgrad"))
        or "algorithm" in group
        or any(
            p.dtype == torch.float64
            or not is_dense(p.shape, p.stride())
            or shards.needs_reference(p, group, takes_8bit_state(p, group))
            for p in params
        )
    )


def rounds_of(params: Sequence[Tensor]) -> dict[int, int]:
    """By a parameter's id: how many earlier ones over the same memory are to be stepped before it, if any.

    An op steps its tensors at the same time. Tied by ``.data``, they are stepped one after the other, as torch does.
    """
    spans = []
    for i, p in enumerate(params):
        x = shards.local(p)
        if type(x) in (Tensor, torch.nn.Parameter) and not x.is_meta and x.numel():
            nbytes = extent(x.shape, x.stride()) * x.element_size()
            spans.append((x.data_ptr(), x.data_ptr() + nbytes, i))
    spans.sort()
    ends = [0, *itertools.accumulate((end for _, end, _ in spans), max)]
    if all(start >= before for (start, _, _), before in zip(spans, ends, strict=False)):
        return {}
    rounds: dict[int, int] = {}
    seen: list[tuple[int, int, int]] = []
    for start, end, i in sorted(spans, key=itemgetter(2)):
        over = [rounds[id(params[k])] for first, last, k in seen if first < end and start < last]
        rounds[id(params[i])] = 1 + max(over, default=-1)
        seen.append((start, end, i))
    return rounds


def step(
    args: StepArgs,
    entries: Sequence[Entry],
    groups: Sequence[Group],
    max_grad_norm: float | None,
    all_ranks: collectives.AllRanks,
    rounds: Mapping[int, int],
    buffers: dict[Any, Tensor],
    hyperparameters: Callable[[StepOp], list[float]],
) -> None:
    """One step of all parameters in ``args``, whose states, in its order, are those of ``entries``.

    Args:
        args: parameters, gradients and groups' numbers; its states and hyperparameters are not used.
        groups: the optimizer's, for messages.
        max_grad_norm: the optimizer's option.
        all_ranks: those that have a part of the optimizer's parameters.
        rounds: see :func:`rounds_of`.
        buffers: memory for parameters with gaps, kept from one step to the next.
        hyperparameters: those of an op, for all groups.
    """
    sharded = bool(all_ranks.meshes)
    norms = _grad_norms(args, max_grad_norm, all_ranks)
    args = _skipped_if_not_finite(args, entries, norms, all_ranks)
    # By round, device, op, whether the reference runs it, and whether other ranks have a part.
    together: dict[Any, tuple[StepOp, list[int]]] = {}
    reductions: dict[str, tuple[StepOp, list[int], list[int]]] = {}  # by op: together, and each alone
    strided = []
    for i, (p, group, state, own, _) in enumerate(entries):
        by_reference = own is AMSGRAD_STEP or p.dtype == torch.float64
        alone = sharded and shards.needs_reference(p, group, any(key.endswith("_scale") for key in state))
        if not p.is_contiguous() and not is_dense(p.shape, p.stride()):
            strided.append((i, p, own, by_reference))
        elif own is not MUON_STEP and (alone or (own.has_trust_ratios and shards.ranks_of(p) is not None)):
            _, some, each = reductions.setdefault(own.name, (own, [], []))
            (each if alone or by_reference else some).append(i)
        else:
            # Matrices that are exchanged by themselves: every rank has the same of them, and so the same buckets.
            exchanged = own is MUON_STEP and shards.ranks_of(p) is not None
            key = rounds.get(id(p), 0), p.device, own.name, by_reference, alone, exchanged
            together.setdefault(key, (own, []))[1].append(i)

    def call(
        own: StepOp, numbers: list[int], by_reference: bool, cut: bool = False, exchanged: bool = False
    ) -> Call:
        found = _part(args, entries, own, numbers)
        norm = norms.get(found.params[0].device)
        found = found._replace(grad_norm=norm, hyperparameters=hyperparameters(own))
        devices = [entries[i].product_device for i in numbers]
        return Call(own, found, by_reference, cut, exchanged, devices)

    params = [entry.param for entry in entries]
    calls = [
        call(own, some, by_reference, cut, exchanged)
        for (_, _, _, by_reference, cut, exchanged), (own, numbers) in sorted(
            together.items(), key=lambda item: item[0][0]
        )
        # Muon's updates are another 2 bytes per parameter while its step runs: of some matrices at a time.
        for some in (
            buckets(numbers, params, dtensor_muon.bytes_of_update) if own is MUON_STEP else [numbers]
        )
    ]
    with_gaps = [(call(own, [i], by_reference), p) for i, p, own, by_reference in strided]
    reduced = [
        (call(own, some, False) if some else None, [call(own, [i], True) for i in each])
        for own, some, each in reductions.values()
    ]
    if len(calls) + len(with_gaps) > 1 and not torch.compiler.is_compiling():
        # An op checks its arguments before it changes anything. By then another one may have stepped.
        for one in calls:
            _check(one, groups, sharded)
        for one, p in with_gaps:
            _check(one, groups, sharded, [_buffer(buffers, p)])

    for one in calls:
        if not one.exchanged:
            _run(one, groups, sharded)
    dtensor_muon.steps([one for one in calls if one.exchanged], groups)
    for first, rest in reduced:
        own = (first or rest[0]).op
        dtensor_step.step_with_reduction(own, first and first.args, [c.args for c in rest])
    for one, p in with_gaps:
        dense = _buffer(buffers, p).copy_(p)
        _run(one, groups, sharded, [dense])
        p.copy_(dense)


def _local(call: Call, sharded: bool, params: list[Tensor] | None) -> StepArgs:
    """The arguments as an op takes them. ``params``: those in place of ones with gaps."""
    taken = dtensor_step.local_args(call.args) if sharded else call.args
    return taken if params is None else taken._replace(params=params)


def _check(call: Call, groups: Sequence[Group], sharded: bool, params: list[Tensor] | None = None) -> None:
    """Raises where the op would refuse its arguments."""
    if call.cut:
        return
    taken = _local(call, sharded, params)
    try:
        # Gradients are checked already, and may have other strides than their parameters. Counters of steps that are on
        # a device, or fake, are not read.
        steps = [
            t if t.is_cpu and type(t) is Tensor else torch.empty_like(t, device="meta") for t in taken.steps
        ]
        check_step(call.op, taken._replace(grads=taken.params, steps=steps))
    except step_errors.OP_ERRORS as error:
        raise step_errors.in_words(error, call.args, groups) from None


def _run(call: Call, groups: Sequence[Group], sharded: bool, params: list[Tensor] | None = None) -> None:
    taken = _local(call, sharded, params)
    try:
        if call.op is MUON_STEP:
            muon_step(taken, call.by_reference, groups, call.product_devices)
        else:
            _ops.step_(call.op, taken, call.by_reference)
    except step_errors.OP_ERRORS as error:
        if torch.compiler.is_compiling():
            raise
        raise step_errors.in_words(error, call.args, groups) from None
    if sharded:
        torch.autograd.graph.increment_version(call.args.params)


def _part(args: StepArgs, entries: Sequence[Entry], op: StepOp, own: list[int]) -> StepArgs:
    """The step of the parameters of these numbers, on one device, with their states."""
    params = [entries[i].param for i in own]
    states = [entries[i].state for i in own]
    lists = {key: [s[key] for s in states if key in s] for key in state_keys(op)}
    found = args._replace(
        params=params,
        grads=[args.grads[i] for i in own],
        group=[args.group[i] for i in own],
        weight_states=[s[key] for s in states for key in weights.KEYS if key in s],
        codec=[c if op.has_4bit_codes or c != POWER4 else CODECS["power"] for c in args.codec],
        **state_args(lists, op),
    )
    return scaler_on(found, params[0].device)


def _buffer(buffers: dict[Any, Tensor], p: Tensor) -> Tensor:
    """Memory for a parameter without gaps, which all parameters of its device and dtype share."""
    like = torch.empty_like(p, device="meta")
    if torch.compiler.is_compiling():
        return torch.empty_like(p)
    key = p.device, p.dtype
    if key not in buffers or buffers[key].numel() < p.numel():
        with torch.inference_mode(False):
            buffers[key] = torch.empty(p.numel(), dtype=p.dtype, device=p.device)
    return buffers[key].as_strided(like.shape, like.stride())


def _grad_norms(
    args: StepArgs, max_grad_norm: float | None, all_ranks: collectives.AllRanks
) -> dict[torch.device, Tensor]:
    """max_grad_norm: the norm of all gradients, fp64, on each device; else nothing."""
    if max_grad_norm is None:
        return {}
    grads = args.grads
    first = grads[0].device
    if all_ranks.meshes:
        own = dtensor_step.local_args(scaler_on(args, first))
        total = collectives.grad_norm(own, [*map(shards.ranks_of, args.params)], all_ranks)
    else:
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64).to(first) for g in grads]
        total = torch.linalg.vector_norm(torch.stack(norms))
        if args.grad_scale is not None:
            total = total / args.grad_scale.to(first).double().reshape(())
    return {device: total.to(device) for device in {g.device for g in grads}}


def _skipped_if_not_finite(
    args: StepArgs,
    entries: Sequence[Entry],
    norms: dict[torch.device, Tensor],
    all_ranks: collectives.AllRanks,
) -> StepArgs:
    """The step with a ``found_inf`` of its own where a gradient that reaches one of Muon's matrices is not finite.

    Newton-Schulz iterations would carry a NaN to the whole matrix, and its momentum would keep it. All ranks skip the
    step, or none. Nothing waits for the device. The gradients are read once more, 0.3 % of a step of GPT-2's matrices
    on a CPU.

    Args:
        norms: with max_grad_norm, those of all gradients, of which a NaN reaches every matrix.
    """
    numbers = [i for i, entry in enumerate(entries) if entry.op is MUON_STEP]
    if not numbers:
        return args
    device = args.grads[0].device
    if norms:
        finite = norms[device].isfinite()
    else:
        grads = dtensor_step.local_args(args).grads if all_ranks.meshes else args.grads
        own = args._replace(grads=[grads[i] for i in numbers])
        finite = collectives.is_finite(own, all_ranks).to(device)
    found = finite.logical_not().float()
    if args.found_inf is not None:
        found = torch.maximum(found, args.found_inf.to(found).reshape(()))
    return args._replace(found_inf=found)
