"""The base class of memkern's optimizers: follows groups, keeps states, takes steps, loads and saves."""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..schemas import MUON_STEP, StepOp
from . import foreign, loading, replaced, step_errors, threads
from .checks import (
    READ_AT_EACH_STEP,
    check_gradient,
    check_group,
    check_norm_of_group,
    check_param,
    make_plain,
    own_options,
    place_lr,
)
from .dtensor import collectives, shards
from .format import Format, takes_8bit_state
from .plan import Entry, StepPlan, Values, overlap_order
from .shared_options import DEFAULTS, SharedOptions, check_names, full_signature
from .state import State, converted, initial_state, misfit

if TYPE_CHECKING:
    from typing_extensions import Self


class BlockwiseOptimizer(Optimizer):
    """Base of the optimizers. A subclass names its op, and maps its options to the op's hyperparameters."""

    op: ClassVar[StepOp]
    option_defaults: ClassVar[SharedOptions] = DEFAULTS
    """Defaults of the options that all optimizers share."""
    fixed_options: ClassVar[dict[str, Any]] = {}
    """Options that make the class what it is: a loaded state does not change them."""
    storage_options: ClassVar[tuple[str, ...]] = (
        "state_bits", "block_size", "codec", "master_weights", "min_8bit_size",
    )  # fmt: skip
    """Options whose changes are followed before a step: how states are stored, and others that need checks."""
    converters: ClassVar[tuple[str, ...]] = ()
    """Functions of memkern.optim that convert other libraries' states for the class."""
    __signature__: ClassVar[inspect.Signature]  # with the shared options, for help() and editors
    grad_scale: Tensor | None
    found_inf: Tensor | None
    _snapshots: list[replaced.Snapshot]  # of each group, as it was at the last step
    _storages: replaced.Storages  # of the parameters of these groups
    _elsewhere: set[int]  # ids of DTensors on meshes without this rank, which does not step them
    _all_ranks: collectives.AllRanks  # the ranks that have a part of any parameter, and decide together
    _overlaps: dict[int, int]  # the turns of the next plan's parameters that share memory: overlap_order in plan.py
    _buffers: dict[Any, Tensor]  # memory in which parameters with gaps are stepped, by device and dtype

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__signature__ = full_signature(cls.__init__, cls.option_defaults)

    def __init__(self, params: Any, arguments: dict[str, Any], options: SharedOptions) -> None:
        """
        Args:
            params: tensors or groups.
            arguments: ``locals()`` of the class's ``__init__``, among which are its own options.
            options: the shared options that were given.
        """
        check_names(getattr(type(self), "optimizer_class", type(self)).__name__, options)
        defaults = {**own_options(arguments, DEFAULTS), **self.option_defaults, **options}
        make_plain(defaults, defaults)
        super().__init__(params, defaults)
        self.state = defaultdict(State, self.state)

    def __new__(cls, *args: Any, **options: Any) -> Self:
        foreign.check_arguments(cls, options)  # before Python's own error, which names no way out
        return super().__new__(cls)

    # ---- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim's; raises before the group is added where an option or a parameter is not supported."""
        params = param_group.get("params") if isinstance(param_group, dict) else None
        if params is None or isinstance(params, set):
            return super().add_param_group(param_group)  # torch raises: no dict, no params, or params without an order
        params = [params] if isinstance(params, Tensor) else list(params)
        param_group = {**param_group, "params": params}
        make_plain(param_group, self.defaults)
        foreign.check_arguments(type(self), param_group)
        tensors = [item[1] if isinstance(item, tuple) else item for item in params]  # without names
        foreign.check_overrides(tensors)
        # The norm of the present groups, which a user may have set after the construction.
        norm = replaced.max_grad_norm(self.param_groups, self.defaults["max_grad_norm"])
        self._check_group_and_params({**self.defaults, "max_grad_norm": norm, **param_group, "params": tensors})
        check_norm_of_group(param_group, norm)
        super().add_param_group(param_group)
        # Set after all checks: steps clip by the default, and a group that was refused must not change it.
        self.defaults["max_grad_norm"] = self.param_groups[-1]["max_grad_norm"] = norm
        place_lr(self.param_groups[-1])
        self._snapshots = [*getattr(self, "_snapshots", []), self._snapshot()[-1]]
        self._storages = getattr(self, "_storages", {}) | replaced.storages_of(self.param_groups[-1:])
        self._find_ranks()

    def _snapshot(self) -> list[replaced.Snapshot]:
        """The groups as they are now, with the options whose changes need work before a step."""
        options = (*self.storage_options, "stochastic_rounding", "max_grad_norm", "capturable")
        return replaced.snapshots(self.param_groups, options)

    def _note_groups(self) -> None:
        """Notes the groups, which are compared with this note from now on."""
        self._snapshots, self._storages = self._snapshot(), replaced.storages_of(self.param_groups)

    def _find_ranks(self) -> None:
        """Finds the ranks that have parts of the parameters, and notes for report() which shards end inside blocks."""
        pairs = [(p, group) for group in self.param_groups for p in self._trained(group)]
        self._buffers = {}
        self._all_ranks, self._elsewhere = collectives.NO_OTHERS, set()
        if any(shards.is_dtensor(p) for p, _ in pairs):
            self._elsewhere = {id(p) for p, _ in pairs if shards.is_elsewhere(p)}
            have_matrices = any(self._op_of(group) is MUON_STEP for _, group in pairs)
            self._all_ranks = collectives.all_ranks_of([p for p, _ in pairs], self.param_groups, have_matrices)
            for p, group in pairs:
                if takes_8bit_state(p, group) and shards.cuts_blocks(p, group["block_size"]):
                    shards.note_cut_blocks(p)

    def _needs_norms(self, max_grad_norm: float | None) -> str | None:
        """The name of the option or class that needs norms of whole tensors, if any."""
        return None if max_grad_norm is None else "max_grad_norm"

    def _check_group(self, group: dict[str, Any]) -> None:
        """Checks a group's options."""
        check_group(group, self._op_of(group))

    def _check_shape(self, p: Tensor, group: dict[str, Any]) -> None:
        """Checks that a parameter has a shape that fits the group's options. By default any does."""

    def _check_param(self, p: Tensor, group: dict[str, Any]) -> None:
        """Checks a parameter, for a step with the group's options."""
        check_param(p, group)
        self._check_shape(p, group)
        shards.check_flat_shard(p, self._needs_norms(group["max_grad_norm"]))

    def _trained(self, group: dict[str, Any]) -> list[Tensor]:
        """The group's parameters that are checked: not lazy ones, nor frozen ones without a state (4-bit weights)."""
        return [
            p
            for p in group["params"]
            if isinstance(p, Tensor) and (p.requires_grad or self.state.get(p)) and not is_lazy(p)
        ]

    def _check_group_and_params(self, group: dict[str, Any]) -> None:
        """Checks a group's options and parameters."""
        self._check_group(group)
        for p in self._trained(group):
            self._check_param(p, group)

    # ---- state

    @property
    def moments(self) -> dict[str, torch.dtype]:
        """The state's moments, and the dtype of their 8-bit codes."""
        return {name: torch.int8 if signed else torch.uint8 for name, signed in self.op.moments.items()}

    def _op_of(self, group: dict[str, Any]) -> StepOp:
        """The op that the group's options ask for."""
        return self.op

    def _init_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter before its first step."""
        return initial_state(self._op_of(group), self._stand_in(p), group)

    def _stand_in(self, p: Tensor, values: bool = False) -> Tensor:
        """A tensor that stands for p where its state is: with the device, memory format and ranks of the state.

        values: whether it must have the parameter's values, too.
        """
        return p

    def _stage_of(self, device: torch.device) -> Any:
        """The Stage (offload/device.py) that brings states to a device for a step; None where they stay on it."""
        return None

    def _follow_groups(self) -> None:
        """Checks groups that have changed since the last step, moves states to new parameters, converts states.

        Raises:
            ValueError, TypeError, RuntimeError: an option or a parameter that is not supported, or a state that does
                not fit the parameter in its place; before anything is changed.
        """
        if replaced.are_same(self._snapshot(), self._snapshots):
            return
        for group in self.param_groups:
            make_plain(group, self.defaults)
        norm = replaced.max_grad_norm(self.param_groups, self.defaults["max_grad_norm"])
        replaced.check_not_flattened(self.param_groups, self._snapshots, self._needs_norms(norm))
        for group in self.param_groups:
            self._check_group_and_params(group)
        for group in self.param_groups:
            for p in group["params"]:
                self._check_entries(p, group)
        moved = replaced.moved(self.param_groups, self.state, self._snapshots, self._storages, self._stand_in)
        for old, new, state in moved:
            del self.state[old]
            if state:
                self.state[new] = state
        self.defaults["max_grad_norm"] = norm
        self._find_ranks()
        for group in self.param_groups:
            place_lr(group)
        pairs = [(p, group) for group in self.param_groups for p in group["params"]]
        for p, group in self._all_ranks.order.sorted(pairs):
            self._convert_storage(p, group)
        self._note_groups()

    def _prepare(self, pairs: Sequence[tuple[Tensor, dict[str, Any]]]) -> None:
        """Before a plan of a step of these parameters is made: makes states that they lack, and converts those that fit
        them no more.

        Raises:
            ValueError, TypeError, RuntimeError: a parameter that is not supported; before anything is changed.
        """
        self._overlaps = overlap_order([p for p, _ in pairs])
        pairs = self._all_ranks.order.sorted(pairs)
        changed = [(p, group) for p, group in pairs if not self._state_in_format(p, group).is_as_stepped(p)]
        for p, group in changed:
            with step_errors.naming_parameter(p, self.param_groups):
                self._check_param(p, group)
            self._check_entries(p, group)
        for p, group in changed:
            state = self._state_in_format(p, group)
            if "step" not in state:
                # A wrapper may have made entries already: they stay.
                state.replace({**state, **self._init_state(p, group)}, Format.of(group))
            else:
                self._convert_storage(p, group)

    def _check_entries(self, p: Tensor, group: dict[str, Any]) -> None:
        """Raises ValueError where the entries of a parameter's state do not have its shape."""
        state = self.state.get(p)
        wrong = misfit(self._op_of(group), State.of(state, Format.of(group)), p) if state else None
        if wrong is not None:
            key, reason = wrong
            raise ValueError(f"{key} of {step_errors.named(p, self.param_groups)} {reason}")

    @torch.no_grad()
    @torch.inference_mode(False)
    def _convert_storage(self, p: Tensor, group: dict[str, Any]) -> None:
        """Converts a state that is not stored as its parameter and its group ask for."""
        state = self._state_in_format(p, group) if self.state.get(p) else None
        if state is None or state.format is None:  # no step yet: what entries there are belong to a wrapper
            return
        like = self._stand_in(p, True)
        if "step" in state:  # users write numbers there, and tensors on the CPU
            step = state["step"]
            dtype = step.dtype if isinstance(step, Tensor) else torch.float32  # the op refuses other tensors
            state["step"] = torch.as_tensor(step, dtype=dtype, device=like.device)
        new = converted(self._op_of(group), state, like, group)
        state.replace({**state} if new is None else new, Format.of(group))  # None: the entries are as asked for

    def _state_in_format(self, p: Tensor, group: dict[str, Any]) -> State:
        """The state of a parameter. What others have put there, a dict or a state after a step without a format, is
        taken to be in the group's format."""
        state = self.state[p]
        if type(state) is not State or (state.format is None and "step" in state):
            self.state[p] = state = State.of(state, Format.of(group))
        return state

    # ---- step

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler reads this, and leaves ``grad_scale`` and ``found_inf`` to step()."""
        return not foreign.lightning_asks()

    def _hyperparameters(self, op: StepOp) -> list[float]:
        """The hyperparameters of an op, one group after the other, as the op takes them."""
        return [float(self._hyperparameter(g, name)) for g in self.param_groups for name in op.hyperparameters]

    def _hyperparameter(self, group: dict[str, Any], name: str) -> float:
        """A group's value of one of the op's hyperparameters: by default the option of that name."""
        if name in ("beta1", "beta2"):
            return group["betas"][0 if name == "beta1" else 1]
        return group[name]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. ``closure``: recomputes the loss with gradients, and its value is returned.

        With a GradScaler the gradients are unscaled inside the kernel, and where one is not finite the whole step is
        skipped: parameters, states and step counters stay as they were.

        Raises:
            RuntimeError, TypeError: a gradient that is sparse, complex or of another shape or device; before
                anything is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_compiling() and self._reads_tensors():
            self._untraced_step()
            return loss

        params: list[Tensor] = []
        grads: list[Tensor] = []
        group_of_each: list[int] = []
        for number, group in enumerate(self.param_groups):
            with_gradient: list[Tensor] = []  # empty lists, as TorchDynamo else traces _init_group
            their_gradients: list[Tensor] = []
            self._init_group(group, with_gradient, their_gradients)
            params += with_gradient
            grads += their_gradients
            group_of_each += [number] * len(with_gradient)
        if params or self._all_ranks.meshes:  # a rank without a gradient takes part in what all ranks decide
            plan = self._plan(params, group_of_each)
            on_host = not torch.compiler.is_compiling() and len(params) > 0 and params[0].is_cpu
            try:
                with threads.with_step_threads() if on_host else nullcontext():
                    plan.run(self._values(grads), self.param_groups, self._buffers)
            except step_errors.OP_ERRORS as error:
                if torch.compiler.is_compiling():
                    raise
                raise self._explained(error, params, grads) from None
        return loss

    def _init_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        """Appends the group's parameters that have a gradient, and their gradients, to the lists.

        The call for the first group does more, for all groups: it follows what has changed in them, and while
        TorchDynamo traces the step it makes the states that are missing, which a traced step cannot make. This is done
        here because TorchDynamo does not trace a method of this name, which torch.optim's optimizers have: it calls it.
        """
        if group is self.param_groups[0]:
            self._follow_groups()
            if torch._guards.TracingContext.try_get() is not None:
                pairs = [(p, owner) for owner in self.param_groups for p in owner["params"]]
                self._prepare([(p, owner) for p, owner in pairs if p.grad is not None and id(p) not in self._elsewhere])
        elsewhere = self._elsewhere
        for p in group["params"]:
            if (g := p.grad) is not None and id(p) not in elsewhere:
                params.append(p)
                grads.append(g)

    def _plan(self, params: Sequence[Tensor], group_of_each: list[int]) -> StepPlan:
        """The plan of a step of ``params``: that of the last step if nothing has changed, else a new one.
        group_of_each: the number of each parameter's group."""
        groups, states = self.param_groups, self.state
        if not torch.compiler.is_compiling():
            state_of_each = [states[p] for p in params]
            # Each state keeps the plan of its last step. A plan that fits is that of all states, so also the first's.
            plan = getattr(state_of_each[0], "plan", None) if params else None
            if plan is not None and plan.still_fits(params, group_of_each, state_of_each, groups, self._snapshots):
                return plan
            self._prepare([(p, groups[k]) for p, k in zip(params, group_of_each, strict=True)])
        entries = [Entry(p, k, states[p], self._op_of(groups[k])) for p, k in zip(params, group_of_each, strict=True)]
        all_ranks = self._all_ranks
        if getattr(self, "_is_restricted", False):  # StepInBackward sets this while it steps some parameters alone
            all_ranks = all_ranks.of(params)
        plan = StepPlan(entries, groups, all_ranks, self._overlaps, self._snapshots, self._stage_of)
        if not torch.compiler.is_compiling():
            for entry in entries:
                entry.state.note_step(entry.param, plan)
        return plan

    def _values(self, grads: list[Tensor]) -> Values:
        """What is new at this step: gradients, hyperparameters and what a GradScaler set."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and self._all_ranks.meshes:
            self.found_inf = found_inf = collectives.largest(found_inf, self._all_ranks)
        norm = self.defaults["max_grad_norm"]
        return Values(grads, self._hyperparameters, norm, getattr(self, "grad_scale", None), found_inf)

    def _explained(self, error: Exception, params: list[Tensor], grads: list[Tensor]) -> Exception:
        """The error of a check that explains an op's error, if one does; else the op's."""
        try:
            for group in self.param_groups:
                make_plain(group, self.defaults)
                self._check_group_and_params(group)
            for p, g in zip(params, grads, strict=True):
                check_gradient(p, g)
        except step_errors.OP_ERRORS as explained:
            return explained
        return error

    def _reads_tensors(self) -> bool:
        """Whether hyperparameters other than lr are tensors. A compiled step would keep their first values: an op takes
        these hyperparameters as floats, and lr as a tensor."""
        names = [name for name in READ_AT_EACH_STEP if name != "lr"]
        options = [group[name] for group in self.param_groups for name in names if name in group]
        return any(
            isinstance(x, Tensor)
            for option in options
            for x in (option if isinstance(option, (tuple, list)) else [option])
        )

    @torch._disable_dynamo
    def _untraced_step(self) -> None:
        """A step that torch.compile does not trace, but calls."""
        BlockwiseOptimizer.step(self)

    # ---- loading and saving

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch.optim's, but every state tensor keeps its dtype, whatever the parameter's.

        The groups' options (``block_size``, ``codec``, lr, ...) come with the state, except the class's fixed ones,
        ``state_bits``, ``master_weights``, ``stochastic_rounding``, ``max_grad_norm`` and ``capturable``: these stay as
        they are. A state of other bits is converted, and one warning lists what differed.

        Raises:
            ValueError: the state is not memkern's, or does not fit the parameters; before anything is changed.
        """
        changes: list[str] = []

        def prepare(_: Optimizer, incoming: dict[str, Any]) -> dict[str, Any]:
            # Runs after the user's own pre-hooks.
            incoming, differences = loading.prepare(self, incoming)
            changes.extend(differences)
            return incoming

        handle = self.register_load_state_dict_pre_hook(prepare)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group in self.param_groups:
            place_lr(group)
        if changes:
            warnings.warn(
                f"the state_dict is of an optimizer with other options than this {type(self).__name__}, whose own win; "
                f"the state was converted: {'; '.join(changes)}",
                stacklevel=2,
            )

    def _check_loaded(self, group: dict[str, Any]) -> None:
        """Checks a group with a state_dict's options, but no dtypes, as those of the saved parameters may differ."""
        self._check_group(group)
        for p in self._trained(group):
            self._check_shape(p, group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # An error or an interrupt up to super's leaves an optimizer as it was.
        groups, defaults = state["param_groups"], {**vars(self), **state}["defaults"]  # a pickle has them in the state
        for options in (defaults, *groups):
            make_plain(options, defaults)
        norm = replaced.max_grad_norm(groups, defaults.get("max_grad_norm"))
        group_of = {p: group for group in groups for p in group["params"]}
        states = ((p, loading.restore_state(x, p, group_of.get(p), self._stand_in)) for p, x in state["state"].items())
        super().__setstate__({**state, "state": defaultdict(State, states)})
        self.defaults["max_grad_norm"] = norm
        self._note_groups()
        self._find_ranks()

    def __getstate__(self) -> dict[str, Any]:
        self._follow_groups()
        return super().__getstate__()

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's: plain tensors, stored as the groups' options say."""
        self._follow_groups()

        def complete(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            # Runs before the user's own post-hooks, which may give the state_dict any form.
            return loading.complete_state_dict(state_dict, self.param_groups, self._op_of)

        handle = self.register_state_dict_post_hook(complete, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()
