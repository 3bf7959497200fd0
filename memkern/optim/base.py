"""What every block-wise optimizer shares: groups, states, the call of the op."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import _ops
from ..schemas import StepArgs, StepOp
from . import apart, bits, following, foreign, loading, sharded_step, sharding, step_errors, weights
from .options import check_gradient, check_group, check_param
from .storage import dense_like, moment_dtype, restored, takes_8bit_state

if TYPE_CHECKING:
    from typing_extensions import Self


class BlockwiseOptimizer(Optimizer):
    """Base of the optimizers. A subclass names its op, and what of its options the op's hyperparameters are."""

    op: ClassVar[StepOp]
    fixed_options: ClassVar[dict[str, Any]] = {}
    """Options that make the class what it is: a loaded state does not change them."""
    storage_options: ClassVar[tuple[str, ...]] = ("state_bits", "block_size", "codec", "master_weights")
    """Options that say how a group's states are stored."""
    converters: ClassVar[tuple[str, ...]] = ()
    """Functions of memkern.optim that convert other libraries' states for the class."""
    grad_scale: Tensor | None
    found_inf: Tensor | None
    # memkern/optim/following.py: the groups at the last look, and the storage options of each state.
    _looks: list[following.Look]
    _stored: dict[Tensor, dict[str, Any]]
    _apart = False  # whether a step needs more than one call of the op
    _sharded = False  # whether there are DTensors
    _ranks: dict[Tensor, sharding.Ranks]  # of those of which other ranks have other elements

    def __new__(cls, *args: Any, **options: Any) -> Self:
        foreign.check_arguments(cls, options)  # Python would say no more than that there is none of that name
        return super().__new__(cls)

    # ---- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim's; raises before the group is added where an option or a parameter is not supported."""
        params = param_group.get("params") if isinstance(param_group, dict) else None
        if params is not None and not isinstance(params, set):  # torch has messages for these
            params = [params] if isinstance(params, Tensor) else list(params)
            param_group = {**param_group, "params": params}
            foreign.check_arguments(type(self), param_group)
            self._check_group({**self.defaults, **param_group})
            norm = self.defaults["max_grad_norm"]
            if param_group.get("max_grad_norm", norm) != norm:
                raise ValueError(
                    f"max_grad_norm belongs to the whole optimizer, which has {norm}; a group cannot have "
                    f"{param_group['max_grad_norm']}"
                )
            tensors = [item[1] if isinstance(item, tuple) else item for item in params]
            foreign.check_overrides(tensors)
            for p in tensors:
                if isinstance(p, Tensor):
                    check_param(p, {**self.defaults, **param_group})
                    sharding.check_flat_shard(p, self._needs_norms(norm))
        super().add_param_group(param_group)
        self._place_lr(self.param_groups[-1])
        self.param_groups[-1]["state_bits"] = bits.of(self.param_groups[-1])
        self._looks = [*getattr(self, "_looks", []), following.looks(self)[-1]]
        self._stored = getattr(self, "_stored", {})
        self._look_at_groups()

    def _look_at_groups(self) -> None:
        """What a step has to know of the parameters."""
        self._apart = any(map(apart.is_needed, self.param_groups))
        params = [p for group in self.param_groups for p in group["params"]]
        self._sharded = any(map(sharding.is_dtensor, params))
        found: dict[sharding.Ranks, sharding.Ranks] = {}  # one object for those that are equal
        self._ranks = {
            p: found.setdefault(ranks, ranks)
            for p in params
            if self._sharded and (ranks := sharding.ranks_of(p))
        }

    def _needs_norms(self, max_grad_norm: float | None) -> str | None:
        """What needs norms of whole tensors, if anything does."""
        return None if max_grad_norm is None else "max_grad_norm"

    def _place_lr(self, group: dict[str, Any]) -> None:
        """capturable: lr becomes a tensor on the parameters' device, which schedulers fill in place."""
        if group["capturable"] and group["params"] and not group["params"][0].is_meta:
            device, lr = group["params"][0].device, group["lr"]
            dtype = lr.dtype if isinstance(lr, Tensor) else torch.float64
            group["lr"] = torch.as_tensor(lr, dtype=dtype, device=device)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_group(group, self.op)

    # ---- state

    @property
    def moments(self) -> dict[str, torch.dtype]:
        """The state's moments, and the dtype of their 8-bit codes."""
        return {name: torch.int8 if signed else torch.uint8 for name, signed in self.op.moments.items()}

    def _op_of(self, group: dict[str, Any]) -> StepOp:
        """The op that the group's options ask for."""
        return self.op

    def _state_keys(self, op: StepOp | None = None) -> list[str]:
        """The entries of the states that an op takes."""
        moments = (op or self.op).moments
        scales = [f"{name}_scale" for name in moments]
        return [*moments, *scales, "step"]

    @torch.inference_mode(False)  # tensors that were made inside could not be written outside
    def _init_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Zero states; the keys of :meth:`_state_keys`, without scales where the moments are floats."""
        state: dict[str, Tensor] = {}
        coded = takes_8bit_state(p, group)
        for name in self._op_of(group).moments:
            dtype = self.moments[name] if coded else moment_dtype(p)
            if coded and dtype == torch.uint8 and bits.has_4bit_codes(group):
                state[name] = sharding.new_packed(p, dense_like(p), group["block_size"])
            else:
                state[name] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
        if coded:
            for name in self.moments:
                state[f"{name}_scale"] = sharding.new_scale(p, dense_like(p), group["block_size"])
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        return state | weights.initial_state(p, group)

    def _follow_groups(self) -> None:
        """Before a step: what is known of the groups is of the groups as they are now."""
        following.follow(self)

    def _init_group(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], *lists: list[Tensor]
    ) -> None:
        """Appends the group's tensors that have a gradient, their gradients, and their states to the lists.

        The name and the shape of the call are torch.optim's: TorchDynamo runs it eagerly instead of tracing it.
        """
        if group is self.param_groups[0]:
            self._follow_groups()
            if torch._guards.TracingContext.try_get() is not None:
                self._repaired()  # a compiled step, traced anew where a parameter's layout changed, cannot do it later
        for p in group["params"]:
            if (g := p.grad) is not None:
                params.append(p)
                grads.append(g)
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            if not state:
                state.update(self._init_state(p, group))
                self._stored[p] = following.storage(self, group)
        scaled = f"{next(iter(self.moments))}_scale"
        coded = [state for state in states if scaled in state]
        *lists_by_key, weight_states = lists
        for key, tensors in zip(self._state_keys(), lists_by_key, strict=True):
            tensors += map(itemgetter(key), coded if key.endswith("_scale") else states)
        for key in weights.keys_of(group):
            weight_states += map(itemgetter(key), states)

    @torch.no_grad()
    @torch.inference_mode(False)
    def _restore(self, p: Tensor, group: dict[str, Any]) -> bool:
        """Converts a state that is stored otherwise than its parameter and its group ask for; whether it was."""
        if not (state := self.state.get(p)):
            return False
        new = restored(self._op_of(group), state, p, group, self._stored.get(p) or group)
        if new:
            state.clear()
            state.update(new)
        self._stored[p] = following.storage(self, group)
        return new is not None

    # ---- step

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """For GradScaler, which leaves ``grad_scale`` and ``found_inf`` to step()."""
        return not foreign.lightning_asks()

    def _hyperparameter(self, group: dict[str, Any], name: str) -> float:
        """A group's value of one of the op's hyperparameters: mostly the option of that name."""
        if name in ("beta1", "beta2"):
            return group["betas"][name == "beta2"]
        return group[name]

    def _learning_rates(self, groups: list[dict[str, Any]]) -> list[Tensor]:
        if torch.compiler.is_compiling():
            # A product is what the compiler can take a changing float into; torch.full would recompile at each change.
            return [
                g["lr"]
                if isinstance(g["lr"], Tensor)
                else torch.ones((), dtype=torch.float64, device="cpu") * g["lr"]
                for g in groups
            ]
        # Reused, so that a step allocates nothing.
        if len(getattr(self, "_lr_buffers", ())) != len(groups):
            with torch.inference_mode(False):
                self._lr_buffers = [torch.zeros((), dtype=torch.float64, device="cpu") for _ in groups]
        return [
            g["lr"] if isinstance(g["lr"], Tensor) else buffer.fill_(g["lr"])
            for g, buffer in zip(groups, self._lr_buffers, strict=True)
        ]

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

        args = None
        try:
            args = self._step_args()
            if not args.params:
                return loss
            if self._sharded:
                sharded_step.reduced_found_inf(self, args.params)
            if not self._apart and len({p.device for p in args.params}) == 1:
                args = self._scaled(args, args.params[0].device)
                if self._sharded:
                    ranks = [self._ranks.get(p) for p in args.params]
                    sharded_step.step(self.op, args, self.defaults["max_grad_norm"], ranks)
                else:
                    _ops.step_(self.op, args._replace(grad_norm=self._grad_norm(args)))
                return loss
        except Exception as error:
            # The op checks everything before it changes anything. Looking at each gradient and each state from here,
            # at every step, would cost more than the step of a small tensor.
            if torch.compiler.is_compiling():
                raise
            if not self._repaired():
                if args is None or (said := step_errors.in_words(error, args, self.param_groups)) is error:
                    raise
                raise said from None
            args = self._step_args()
        apart.step(self, args)
        return loss

    def _repaired(self) -> bool:
        """After an op has refused its arguments: whether states were converted, as after ``model.to(channels_last)``.

        Raises what the checks of groups, parameters and gradients do, whose messages say more than the op's.
        """
        for group in self.param_groups:
            self._check_group(group)
            for p in group["params"]:
                check_param(p, group)
                if p.grad is not None:
                    check_gradient(p, p.grad)
        changed = False
        for group in self.param_groups:
            for p in group["params"]:
                changed |= self._restore(p, group)
        before = self._apart, self._sharded
        self._look_at_groups()
        return changed or before != (self._apart, self._sharded)

    def _step_args(self) -> StepArgs:
        """The arguments of the op for all parameters that have a gradient, as if they were on one device."""
        groups, keys = self.param_groups, self._state_keys()
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
            lr=self._learning_rates(groups),
            hyperparameters=[
                float(self._hyperparameter(g, name)) for g in groups for name in self.op.hyperparameters
            ],
            codec=[bits.codec_number(g) for g in groups],
            block_size=[g["block_size"] for g in groups],
            weight_states=weight_states,
            weight_storage=[weights.storage_of(g) for g in groups],
            max_grad_norm=float(self.defaults["max_grad_norm"] or 0.0),
            **self._state_args(states, self.op),
        )

    def _state_args(self, states: dict[str, list[Tensor]], op: StepOp) -> dict[str, Any]:
        """The lists of states by key as the op's lists."""
        return {
            "moments": [x for name in op.moments for x in states[name]],
            "scales": [x for name in op.moments for x in states[f"{name}_scale"]],
            "steps": states["step"],
            "trust_ratios": states.get("trust_ratio", []),
        }

    def _scaled(self, args: StepArgs, device: torch.device) -> StepArgs:
        """With the ``grad_scale`` and ``found_inf`` that a GradScaler set for this step."""
        scale, inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is None and inf is None:
            return args
        return args._replace(
            grad_scale=None if scale is None else scale.to(device),
            found_inf=None if inf is None else inf.to(device),
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

        def hold(_: Optimizer, incoming: dict[str, Any]) -> dict[str, Any]:
            # Runs after the user's own pre-hooks. torch would cast every tensor to the parameter's dtype, which
            # destroys codes, so it gets to see none.
            incoming, found = loading.prepared(self, incoming)
            changes.extend(found)
            return incoming

        handle = self.register_load_state_dict_pre_hook(hold)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group in self.param_groups:
            self._place_lr(group)
        if changes:
            warnings.warn(
                f"the state_dict is of an optimizer with other options than this {type(self).__name__}, whose own win; "
                f"the state was converted: {'; '.join(changes)}",
                stacklevel=2,
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in (self.defaults, *self.param_groups):
            group["state_bits"] = bits.of(group)
        for p, values in self.state.items():
            if isinstance(values, dict):
                for key, value in values.items():
                    if isinstance(value, loading.Held):
                        values[key] = value.for_parameter(p)
        self._looks = following.looks(self)
        self._stored = {p: following.storage(self, g) for g in self.param_groups for p in g["params"]}
        self._look_at_groups()

    def __getstate__(self) -> dict[str, Any]:
        following.follow(self)
        return super().__getstate__()

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's: plain tensors, stored as the groups' options say."""
        following.follow(self)
        return sharding.without_flat_codes(self, super().state_dict())

    def _check_state(self, i: Any, state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> None:
        loading.check_state(self, i, state, p, group)
