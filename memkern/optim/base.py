"""What every block-wise optimizer shares: groups, states, the call of the op."""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .. import _ops
from ..schemas import StepArgs, StepOp
from . import following, foreign, loading, multi_call, step_errors, weights
from .dtensor import collectives, shards
from .dtensor import step as dtensor_step
from .format import Format, takes_8bit_state
from .options import check_gradient, check_group, check_norm_of_group, check_param
from .shared_options import DEFAULTS, SharedOptions, check_names, full_signature
from .state import State, converted, initial_state, state_keys
from .step_args import learning_rates, place_lr, scaler_on, state_args

if TYPE_CHECKING:
    from typing_extensions import Self


class BlockwiseOptimizer(Optimizer):
    """Base of the optimizers. A subclass names its op, and maps options to the op's hyperparameters."""

    op: ClassVar[StepOp]
    option_defaults: ClassVar[SharedOptions] = DEFAULTS
    """Defaults of the options that all optimizers share."""
    fixed_options: ClassVar[dict[str, Any]] = {}
    """Options that make the class what it is: a loaded state does not change them."""
    storage_options: ClassVar[tuple[str, ...]] = (
        "state_bits", "block_size", "codec", "master_weights", "min_8bit_size",
    )  # fmt: skip
    """Options that say how a group's states are stored."""
    converters: ClassVar[tuple[str, ...]] = ()
    """Functions of memkern.optim that convert other libraries' states for the class."""
    __signature__: ClassVar[inspect.Signature]  # with the shared options, for help() and editors
    grad_scale: Tensor | None
    found_inf: Tensor | None
    _looks: list[following.Look]  # the groups at the last step
    _frozen: set[int]  # ids of parameters that no step is prepared for: frozen, or lazy
    _multi_call = False  # whether a step needs several calls of ops
    _sharded = False  # whether there are DTensors
    _ranks: dict[Tensor, shards.Ranks]  # the ranks that hold other elements of a parameter
    _rounds: dict[int, int]  # of parameters over one memory
    _elsewhere: set[int]  # ids of DTensors on meshes that this rank is no part of
    _all_ranks: collectives.AllRanks  # of all parameters: what one rank decides, all do
    _lr_buffers: list[Tensor]  # memory that steps use again
    _strided_buffers: dict[Any, Tensor]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__signature__ = full_signature(cls.__init__, cls.option_defaults)

    def __init__(self, params: Any, defaults: dict[str, Any], options: SharedOptions) -> None:
        """``defaults``: the class's own options. ``options``: the shared ones that were given."""
        check_names(getattr(type(self), "optimizer_class", type(self)).__name__, options)
        super().__init__(params, {**defaults, **self.option_defaults, **options})
        self.state = defaultdict(State, self.state)

    def __new__(cls, *args: Any, **options: Any) -> Self:
        foreign.check_arguments(cls, options)  # before Python's own error, which names no way out
        return super().__new__(cls)

    # ---- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim's; raises before the group is added where an option or a parameter is not supported."""
        params = param_group.get("params") if isinstance(param_group, dict) else None
        if params is not None and not isinstance(params, set):  # torch has errors for these
            params = [params] if isinstance(params, Tensor) else list(params)
            param_group = {**param_group, "params": params}
            foreign.check_arguments(type(self), param_group)
            tensors = [item[1] if isinstance(item, tuple) else item for item in params]
            foreign.check_overrides(tensors)
            norm = self.defaults["max_grad_norm"]
            self._check_params({**self.defaults, **param_group, "params": tensors}, norm)
            check_norm_of_group(param_group, norm)
        super().add_param_group(param_group)
        place_lr(self.param_groups[-1])
        self.param_groups[-1]["state_bits"] = Format.of(self.param_groups[-1]).state_bits
        self._looks = [*getattr(self, "_looks", []), self._look()[-1]]
        self._look_at_groups()

    def _look(self) -> list[following.Look]:
        return following.looks(self.param_groups, (*self.storage_options, "max_grad_norm", "capturable"))

    def _look_at_groups(self) -> None:
        """Finds out which kinds of parameters there are, which decides how a step is taken."""
        self._multi_call = any(multi_call.is_needed(g, self._trained(g)) for g in self.param_groups)
        self._rounds = multi_call.rounds_of([p for g in self.param_groups for p in self._trained(g)])
        self._multi_call |= bool(self._rounds)
        self._lr_buffers, self._strided_buffers = [], {}
        pairs = [(p, group) for group in self.param_groups for p in self._trained(group)]
        stepped = {id(p) for p, _ in pairs}
        self._frozen = {id(p) for group in self.param_groups for p in group["params"]} - stepped
        self._sharded = any(shards.is_dtensor(p) for p, _ in pairs)
        self._ranks = shards.ranks_of_each([p for p, _ in pairs]) if self._sharded else {}
        self._all_ranks, self._elsewhere = collectives.NO_OTHERS, set()
        if self._sharded:
            self._elsewhere = {id(p) for p, _ in pairs if shards.is_elsewhere(p)}
            self._all_ranks = collectives.all_ranks_of([p for p, _ in pairs])
        for p, group in pairs if self._ranks else ():
            if takes_8bit_state(p, group) and shards.cuts_blocks(p, group["block_size"]):
                shards.note_cut_blocks(p)

    def _needs_norms(self, max_grad_norm: float | None) -> str | None:
        """The option or class that needs norms of whole tensors, if any."""
        return None if max_grad_norm is None else "max_grad_norm"

    def _check_group(self, group: dict[str, Any]) -> None:
        """Checks a group's options."""
        check_group(group, self._op_of(group))

    def _check_shape(self, p: Tensor, group: dict[str, Any]) -> None:
        """Checks what the group's options ask of a parameter's shape."""

    def _check_param(self, p: Tensor, group: dict[str, Any]) -> None:
        """Checks a parameter, for a step with the group's options."""
        check_param(p, group)
        self._check_shape(p, group)

    def _trained(self, group: dict[str, Any]) -> list[Tensor]:
        """The group's parameters without frozen ones, of any kind (4-bit weights under adapters), and lazy ones."""
        return [
            p
            for p in group["params"]
            if isinstance(p, Tensor) and (p.requires_grad or self.state.get(p)) and not is_lazy(p)
        ]

    def _check_params(self, group: dict[str, Any], max_grad_norm: float | None) -> None:
        """Checks a group's options and parameters."""
        self._check_group(group)
        for p in self._trained(group):
            self._check_param(p, group)
            shards.check_flat_shard(p, self._needs_norms(max_grad_norm))

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
        return initial_state(self._op_of(group), p, group)

    def _follow_groups(self) -> None:
        """Where groups have changed since the last step: checks them, moves states to new parameters, converts states.

        Raises:
            ValueError, TypeError, RuntimeError: an option or a parameter that is not supported, or a state that does
                not fit the parameter in its place; before anything is changed.
        """
        if self._look() == self._looks:
            return
        norm = following.max_grad_norm(self.param_groups, self.defaults["max_grad_norm"])
        following.check_not_flattened(self.param_groups, self._looks, self._needs_norms(norm))
        for group in self.param_groups:
            group["state_bits"] = Format.of(group).state_bits
            self._check_params(group, norm)
        moves = [*following.moves(self.param_groups, self.state, self._looks)]
        states = [
            following.moved(State.of(self.state[old], Format.of(group)), new) for old, new, group in moves
        ]
        for (old, new, _), state in zip(moves, states, strict=True):
            del self.state[old]
            if state:
                self.state[new] = state
        self.defaults["max_grad_norm"] = norm
        for group in self.param_groups:
            place_lr(group)
            for p in group["params"]:
                self._convert_storage(p, group)
        self._look_at_groups()
        self._looks = self._look()

    def _init_group(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], *lists: list[Tensor]
    ) -> None:
        """Appends the group's parameters that have a gradient, their gradients and their states to the lists.

        The states are left out where the step takes several calls, which look for those of their own op. Name and
        arguments are torch.optim's, because TorchDynamo runs this method eagerly instead of tracing it.
        """
        if group is self.param_groups[0]:
            self._follow_groups()
            if torch._guards.TracingContext.try_get() is not None:
                self._convert_misfits()  # while a step is traced: the compiled step itself cannot
                # TorchDynamo looks at self.state after the first group, and would not see what later ones add.
                for each in self.param_groups:
                    self._init_states(each)
        elsewhere = self._elsewhere
        for p in group["params"]:
            if (g := p.grad) is not None and id(p) not in elsewhere:
                params.append(p)
                grads.append(g)
        states = [self.state[p] for p in params]
        if not all("step" in state for state in states):
            self._init_states(group)
        if self._multi_call:
            return
        scaled = f"{next(iter(self.op.moments))}_scale"
        coded = [state for state in states if scaled in state]
        *lists_by_key, weight_states = lists
        for key, tensors in zip(state_keys(self.op), lists_by_key, strict=True):
            tensors += map(itemgetter(key), coded if key.endswith("_scale") else states)
        for key in weights.keys_of(group):
            weight_states += map(itemgetter(key), states)

    def _init_states(self, group: dict[str, Any]) -> None:
        """Makes the states of the group's parameters that have a gradient and none yet."""
        here = (p for p in group["params"] if id(p) not in self._elsewhere)
        new = [p for p in here if p.grad is not None and "step" not in self.state[p]]
        thawed = [p for p in new if id(p) in self._frozen]
        if thawed:
            self._check_thawed(thawed, group)
        for p in new:
            # Beside entries that a wrapper has made already.
            made = {**self.state[p], **self._init_state(p, group)}
            self.state[p] = self._known(p, group)
            self.state[p].replace(made, Format.of(group))
        if thawed or (len(new) > 1 and not torch.compiler.is_compiling()):
            self._look_at_groups()  # memory may have been tied since the group was added

    def _check_thawed(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Checks parameters that were frozen when the groups were looked at."""
        needs_norms = self._needs_norms(self.defaults["max_grad_norm"])
        p = params[0]
        try:
            for p in params:
                self._check_param(p, group)
                shards.check_flat_shard(p, needs_norms)
        except step_errors.OP_ERRORS as error:
            raise step_errors.of_parameter(error, p, self.param_groups) from None

    @torch.no_grad()
    @torch.inference_mode(False)
    def _convert_storage(self, p: Tensor, group: dict[str, Any]) -> bool:
        """Converts a state that is stored otherwise than its parameter and its group ask for; whether it was."""
        if not self.state.get(p) or (state := self._known(p, group)).format is None:
            return False
        new = converted(self._op_of(group), state, p, group)
        state.replace(new or {**state}, Format.of(group))
        return new is not None

    def _known(self, p: Tensor, group: dict[str, Any]) -> State:
        """The state of a parameter, which knows its format: the group's, where somebody else has put a dict there."""
        if type(state := self.state[p]) is not State:
            self.state[p] = state = State.of(state, Format.of(group))
        return state

    # ---- step

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """For GradScaler, which leaves ``grad_scale`` and ``found_inf`` to step()."""
        return not foreign.lightning_asks()

    def _hyperparameters(self, op: StepOp) -> list[float]:
        """Those of an op, one group after the other."""
        return [
            float(self._hyperparameter(g, name)) for g in self.param_groups for name in op.hyperparameters
        ]

    def _hyperparameter(self, group: dict[str, Any], name: str) -> float:
        """A group's value of one of the op's hyperparameters: by default the option of that name."""
        if name in ("beta1", "beta2"):
            return group["betas"][name == "beta2"]
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

        args = self._step_args()
        if not args.params:
            return loss
        if self._sharded and args.found_inf is not None:
            self.found_inf = collectives.largest(args.found_inf, self._all_ranks)
            args = args._replace(found_inf=self.found_inf)
        if not self._multi_call and len({p.device for p in args.params}) == 1:
            try:
                self._step_in_one_call(args)
            except step_errors.OP_ERRORS as error:
                # Looked for: a parameter that got another layout since its state was stored. The op refuses it before
                # it changes anything. Looking at every layout in every step takes longer than a small tensor's step.
                if torch.compiler.is_compiling():
                    raise
                if not self._convert_misfits():
                    raise step_errors.in_words(error, args, self.param_groups) from None
                args = self._step_args()
            else:
                return loss
        self._step_in_calls(args)
        return loss

    def _reads_tensors(self) -> bool:
        """Whether hyperparameters are tensors. A compiled op would have the numbers of the first step."""
        return any(isinstance(b, Tensor) for group in self.param_groups for b in group.get("betas", ()))

    @torch._disable_dynamo
    def _untraced_step(self) -> None:
        BlockwiseOptimizer.step(self)

    def _step_in_one_call(self, args: StepArgs) -> None:
        """The step of parameters on one device, all of which the op takes."""
        args = scaler_on(args, args.params[0].device)
        if self._sharded:
            ranks = [self._ranks.get(p) for p in args.params]
            dtensor_step.step(self.op, args, self.defaults["max_grad_norm"], ranks, self._all_ranks)
        else:
            _ops.step_(self.op, args._replace(grad_norm=self._grad_norm(args)))

    def _step_in_calls(self, args: StepArgs) -> None:
        """The step of parameters on several devices, or of which some need another op, a copy or a reduction."""
        groups = [self.param_groups[number] for number in args.group]
        compiling = torch.compiler.is_compiling()  # a look would be a guard for each state
        moved = [
            (p, group)
            for p, group in zip(args.params, groups, strict=True)
            if compiling or not self._known(p, group).is_as_converted(p)
        ]
        for p, group in moved:
            self._check_param(p, group)
        for p, g in zip(args.params, args.grads, strict=True):
            check_gradient(p, g)
        for p, group in moved:
            self._convert_storage(p, group)
            if not compiling:
                self._known(p, group).note_converted(p)
        entries = self._entries(args.params, groups)
        multi_call.step(
            args,
            entries,
            self.param_groups,
            self.defaults["max_grad_norm"],
            self._all_ranks,
            self._rounds,
            self._strided_buffers,
            self._hyperparameters,
        )

    def _entries(self, params: Sequence[Tensor], groups: list[dict[str, Any]]) -> list[multi_call.Entry]:
        states = self.state
        return [
            multi_call.Entry(p, group, states[p], self._op_of(group))
            for p, group in zip(params, groups, strict=True)
        ]

    def _convert_misfits(self) -> bool:
        """Converts states that do not fit their parameters any more, as after ``model.to(channels_last)``.

        Returns whether there were such states, or parameters that now need several calls. Raises the errors of the
        checks of groups, parameters and gradients, which say more than an op's.
        """
        for group in self.param_groups:
            self._check_params(group, self.defaults["max_grad_norm"])
            for p in group["params"]:
                if p.grad is not None:
                    check_gradient(p, p.grad)
        changed = False
        for group in self.param_groups:
            for p in group["params"]:
                changed |= self._convert_storage(p, group)
        before = self._multi_call, self._sharded
        self._look_at_groups()
        return changed or before != (self._multi_call, self._sharded)

    def _step_args(self) -> StepArgs:
        """The arguments of the op for all parameters that have a gradient, as if they were on one device."""
        groups, keys = self.param_groups, state_keys(self.op)
        params: list[Tensor] = []
        grads: list[Tensor] = []
        numbers: list[int] = []
        states: dict[str, list[Tensor]] = {key: [] for key in keys}
        weight_states: list[Tensor] = []
        for number, group in enumerate(groups):
            of_group: list[list[Tensor]] = [[] for _ in range(3 + len(keys))]
            self._init_group(group, *of_group)
            for tensors, more in zip((params, grads, *states.values(), weight_states), of_group, strict=True):
                tensors += more
            numbers += [number] * len(of_group[0])
        return StepArgs(
            params,
            grads,
            group=numbers,
            lr=learning_rates(groups, self._lr_buffers),
            hyperparameters=self._hyperparameters(self.op),
            codec=[Format.of(g).codec_number for g in groups],
            block_size=[g["block_size"] for g in groups],
            weight_states=weight_states,
            weight_storage=[weights.storage_of(g) for g in groups],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            max_grad_norm=float(self.defaults["max_grad_norm"] or 0.0),
            **state_args(states, self.op),
        )

    def _grad_norm(self, args: StepArgs) -> Tensor | None:
        """max_grad_norm: the norm of all gradients, fp64; else nothing."""
        if self.defaults["max_grad_norm"] is None:
            return None
        norm, device = getattr(self, "_norm_buffer", None), args.params[0].device
        if torch.compiler.is_compiling() or norm is None or norm.device != device:
            with torch.inference_mode(False):
                norm = torch.zeros((), dtype=torch.float64, device=device)
            self._norm_buffer = norm  # reused, so that a step allocates nothing
        _ops.grad_norm_(norm, args.grads, args.grad_scale)
        return norm

    # ---- loading and saving

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch.optim's, but every state tensor keeps its dtype, whatever the parameter's.

        Options of the groups (``block_size``, ``codec``, lr, ...) come with the state, but for what this optimizer is:
        its class, its ``state_bits``, ``max_grad_norm`` and ``capturable``. A state of other bits is converted, and one
        warning lists what differed.

        Raises:
            ValueError: the state is not memkern's, or does not fit the parameters; before anything is changed.
        """
        changes: list[str] = []

        target = loading.Target(
            type(self).__name__, self.param_groups, self.defaults, self.fixed_options, self.converters,
            self._op_of, self._check_loaded,
        )  # fmt: skip

        def hide(_: Optimizer, incoming: dict[str, Any]) -> dict[str, Any]:
            # Runs after the user's own pre-hooks.
            incoming, found = loading.prepared(target, incoming)
            changes.extend(found)
            return incoming

        handle = self.register_load_state_dict_pre_hook(hide)
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
        """Checks a group with the options of a state_dict, whose parameters may have been of another dtype."""
        self._check_group(group)
        for p in self._trained(group):
            self._check_shape(p, group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in (self.defaults, *self.param_groups):
            group["state_bits"] = Format.of(group).state_bits
        groups = {p: group for group in self.param_groups for p in group["params"]}
        self.state = defaultdict(
            State, {p: loading.restored(values, p, groups.get(p)) for p, values in self.state.items()}
        )
        norm = self.defaults.get("max_grad_norm")
        self.defaults["max_grad_norm"] = following.max_grad_norm(self.param_groups, norm)
        self._looks = self._look()
        self._look_at_groups()

    def __getstate__(self) -> dict[str, Any]:
        self._follow_groups()
        return super().__getstate__()

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's: plain tensors, stored as the groups' options say."""
        self._follow_groups()
        return loading.saved(super().state_dict(), self.param_groups, self._op_of)
