"""What every block-wise optimizer shares: groups, states, checks, the call of the op, loading."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import _ops
from ..quant.codec import CODECS
from ..quant.layout import layout_of, same_layout
from ..schemas import StepArgs, StepOp
from .options import check_gradient, check_group, check_param

# 1-D tensors stay fp32 up to this many times min_8bit_size: biases and norms are small and matter, while the flat
# shards that data-parallel wrappers make are far larger.
MIN_1D_FACTOR = 16


class BlockwiseOptimizer(Optimizer):
    """Base of the optimizers. A subclass names its op, and what of its options the op's hyperparameters are."""

    op: ClassVar[StepOp]
    _step_supports_amp_scaling = True  # GradScaler leaves grad_scale and found_inf to step()

    grad_scale: Tensor | None
    found_inf: Tensor | None

    # ---- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim's; raises before the group is added where an option or a parameter is not supported."""
        params = param_group.get("params") if isinstance(param_group, dict) else None
        if params is not None and not isinstance(params, set):  # torch has messages for these
            params = [params] if isinstance(params, Tensor) else list(params)
            param_group = {**param_group, "params": params}
            self._check_group({**self.defaults, **param_group})
            for key in ("max_grad_norm", "capturable"):
                if param_group.get(key, self.defaults[key]) != self.defaults[key]:
                    raise ValueError(
                        f"{key} belongs to the whole optimizer, which has {self.defaults[key]}; a group cannot have "
                        f"{param_group[key]}"
                    )
            for item in params:
                p = item[1] if isinstance(item, tuple) else item
                if isinstance(p, Tensor):
                    check_param(p)
        super().add_param_group(param_group)
        self._place_lr(self.param_groups[-1])

    def _place_lr(self, group: dict[str, Any]) -> None:
        """capturable: lr becomes a tensor on the parameters' device, which schedulers fill in place."""
        if self.defaults["capturable"] and group["params"]:
            device, lr = group["params"][0].device, group["lr"]
            dtype = lr.dtype if isinstance(lr, Tensor) else torch.float64
            group["lr"] = torch.as_tensor(lr, dtype=dtype, device=device)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_group(group)

    # ---- state

    @property
    def moments(self) -> dict[str, torch.dtype]:
        """The state's moments, and the dtype of their 8-bit codes."""
        return {name: torch.int8 if signed else torch.uint8 for name, signed in self.op.moments.items()}

    def _state_keys(self) -> list[str]:
        scales = [f"{name}_scale" for name in self.moments]
        return [*self.moments, *scales, "step"]

    def _init_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Zero states; the keys of :meth:`_state_keys`, without scales where the state is fp32."""
        state: dict[str, Tensor] = {}
        coded = takes_8bit_state(p, group)
        for name, dtype in self.moments.items():
            state[name] = torch.zeros_like(p, dtype=dtype if coded else torch.float32, requires_grad=False)
        if coded:
            shape = layout_of(p, group["block_size"]).scale_shape
            for name in self.moments:
                state[f"{name}_scale"] = torch.zeros(shape, dtype=torch.float32, device=p.device)
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        return state

    def _init_group(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], *lists: list[Tensor]
    ) -> None:
        """Appends the group's tensors that have a gradient, their gradients, and their states to the lists.

        The name and the shape of the call are torch.optim's: TorchDynamo runs it eagerly instead of tracing it.
        """
        for p in group["params"]:
            if (g := p.grad) is not None:
                params.append(p)
                grads.append(g)
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            if not state:
                state.update(self._init_state(p, group))
        scaled = f"{next(iter(self.moments))}_scale"
        coded = [state for state in states if scaled in state]
        for key, tensors in zip(self._state_keys(), lists, strict=True):
            tensors += map(itemgetter(key), coded if key.endswith("_scale") else states)

    # ---- step

    def _hyperparameter(self, group: dict[str, Any], name: str) -> float:
        """A group's value of one of the op's hyperparameters: mostly the option of that name."""
        if name in ("beta1", "beta2"):
            return group["betas"][name == "beta2"]
        return group[name]

    def _learning_rates(self, groups: list[dict[str, Any]]) -> list[Tensor]:
        if torch.compiler.is_compiling():
            # A product is what the compiler can take a changing float into; torch.full would recompile at each change.
            return [
                g["lr"] if isinstance(g["lr"], Tensor) else torch.ones((), dtype=torch.float64) * g["lr"]
                for g in groups
            ]
        # Reused, so that a step allocates nothing.
        if len(getattr(self, "_lr_buffers", ())) != len(groups):
            self._lr_buffers = [torch.zeros((), dtype=torch.float64) for _ in groups]
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

        try:
            steps = self._by_device(self._step_args())
            norms = self._grad_norms(steps)
            for device, args in steps.items():
                _ops.step_(self.op, args._replace(grad_norm=norms.get(device)))
        except Exception:
            # The op checks everything before it changes anything. Looking at each gradient from here, at every step,
            # would cost more than the step of a small tensor; it is only done for a better message.
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        check_gradient(p, p.grad)
            raise
        return loss

    def _step_args(self) -> StepArgs:
        """The arguments of the op for all parameters that have a gradient, as if they were on one device."""
        groups, keys = self.param_groups, self._state_keys()
        params: list[Tensor] = []
        grads: list[Tensor] = []
        numbers: list[int] = []
        states: dict[str, list[Tensor]] = {key: [] for key in keys}
        for number, group in enumerate(groups):
            of_group: list[list[Tensor]] = [[] for _ in range(2 + len(keys))]
            self._init_group(group, *of_group)
            for tensors, more in zip((params, grads, *states.values()), of_group, strict=True):
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
            codec=[CODECS[g["codec"]] for g in groups],
            block_size=[g["block_size"] for g in groups],
            max_grad_norm=float(self.defaults["max_grad_norm"] or 0.0),
            **self._state_args(states),
        )

    def _state_args(self, states: dict[str, list[Tensor]]) -> dict[str, Any]:
        """The lists of states by key as the op's lists."""
        names = self.op.moments
        return {
            "moments": [x for name in names for x in states[name]],
            "scales": [x for name in names for x in states[f"{name}_scale"]],
            "steps": states["step"],
            "trust_ratios": states.get("trust_ratio", []),
        }

    def _by_device(self, args: StepArgs) -> dict[torch.device, StepArgs]:
        """The step of each device that has parameters, with what a GradScaler set for it."""
        devices = dict.fromkeys(p.device for p in args.params)
        if len(devices) == 1:
            return {device: self._scaled(args, device) for device in devices}
        steps = {}
        for device in devices:
            own = [i for i, p in enumerate(args.params) if p.device == device]
            states = [self.state[args.params[i]] for i in own]
            lists = {key: [s[key] for s in states if key in s] for key in self._state_keys()}
            steps[device] = self._scaled(
                args._replace(
                    params=[args.params[i] for i in own],
                    grads=[args.grads[i] for i in own],
                    group=[args.group[i] for i in own],
                    **self._state_args(lists),
                ),
                device,
            )
        return steps

    def _scaled(self, args: StepArgs, device: torch.device) -> StepArgs:
        """With the ``grad_scale`` and ``found_inf`` that a GradScaler set for this step."""
        scale, inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is None and inf is None:
            return args
        return args._replace(
            grad_scale=None if scale is None else scale.to(device),
            found_inf=None if inf is None else inf.to(device),
        )

    def _grad_norms(self, steps: dict[torch.device, StepArgs]) -> dict[torch.device, Tensor]:
        """max_grad_norm: the norm of all gradients, fp64, on each device; else nothing."""
        if self.defaults["max_grad_norm"] is None:
            return {}
        if torch.compiler.is_compiling() or {*getattr(self, "_norm_buffers", ())} != {*steps}:
            self._norm_buffers = {d: torch.zeros((), dtype=torch.float64, device=d) for d in steps}
        norms = self._norm_buffers  # reused, so that a step allocates nothing
        for device, args in steps.items():
            _ops.grad_norm_(norms[device], args.grads, args.grad_scale)
        if len(norms) > 1:
            first = next(iter(norms))
            total = torch.stack([norm.to(first) for norm in norms.values()]).square().sum().sqrt()
            return {device: total.to(device) for device in norms}
        return norms

    # ---- loading

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch.optim's, but every state tensor keeps its dtype, whatever the parameter's.

        Options of the groups (``state_bits``, ``block_size``, ``codec``, ...) come with the state.

        Raises:
            ValueError: the state is not memkern's, or does not fit the parameters; before anything is changed.
        """

        def hold(_: Optimizer, incoming: dict[str, Any]) -> dict[str, Any]:
            # Runs after the user's own pre-hooks. torch would cast every tensor to the parameter's dtype, which
            # destroys codes, so it gets to see none.
            state = {index: self._completed_state(state) for index, state in incoming["state"].items()}
            incoming = {**incoming, "state": state}
            self._check_state_dict(incoming)
            held = {
                index: {
                    key: _Held(value) if isinstance(value, Tensor) else value for key, value in state.items()
                }
                for index, state in incoming["state"].items()
            }
            return {**incoming, "state": held}

        handle = self.register_load_state_dict_pre_hook(hold)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group in self.param_groups:
            group.update({key: self.defaults[key] for key in ("max_grad_norm", "capturable")})
            self._place_lr(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for p, values in self.state.items():
            values.update(self._completed_state(values))
            for key, value in values.items():
                if isinstance(value, _Held):
                    tensor = value.tensor.detach()
                    like = p if tensor.shape == p.shape else tensor
                    fresh = torch.empty_like(like, dtype=tensor.dtype, device=p.device)
                    values[key] = fresh.requires_grad_(False).copy_(tensor)

    def _completed_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """A parameter's state of an earlier version with what it did not have yet."""
        return state

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups, saved = self.param_groups, state_dict["param_groups"]
        if len(groups) != len(saved) or any(
            len(g["params"]) != len(s["params"]) for g, s in zip(groups, saved, strict=True)
        ):
            return  # torch has a message for this
        own = {*self.defaults} - {"differentiable"}  # torch's __setstate__ adds that one
        for k, s in enumerate(saved):
            if missing := own - {*s}:
                raise ValueError(
                    f"the state_dict is not one of memkern's {type(self).__name__}: its group {k} has no "
                    f"{', '.join(sorted(missing))}; for a torch.optim or bitsandbytes state see "
                    "memkern.optim.from_torch_state_dict and from_bitsandbytes_state_dict"
                )
            self._check_group({**s, "params": groups[k]["params"]})
        of_index = {
            i: (p, s)
            for g, s in zip(groups, saved, strict=True)
            for p, i in zip(g["params"], s["params"], strict=True)
        }
        for i, state in state_dict["state"].items():
            if i in of_index and state:
                self._check_state(i, state, *of_index[i])

    def _check_state(self, i: Any, state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> None:
        def fail(what: str) -> None:
            raise ValueError(f"the state of parameter {i} does not fit {type(self).__name__}: {what}")

        first = state.get(next(iter(self.moments)))
        coded = isinstance(first, Tensor) and first.dtype != torch.float32
        keys = [k for k in self._state_keys() if coded or not k.endswith("_scale")]
        if {*state} != {*keys}:
            fail(f"keys {sorted(state)}, expected {sorted(keys)}")
        shape = layout_of(p, group["block_size"]).scale_shape
        for key in keys:
            value = state[key]
            if not isinstance(value, Tensor):
                fail(f"{key} must be a tensor, got {type(value).__name__}")
            if key == "step":
                if value.numel() != 1 or value.dtype != torch.float32 or not 0 <= float(value) < math.inf:
                    fail(f"step must be one finite float32, 0 or more, got {value}")
            elif key.endswith("_scale"):
                if value.dtype != torch.float32 or tuple(value.shape) != shape:
                    fail(
                        f"{key} must be float32 of shape {shape}, got {value.dtype} of shape {tuple(value.shape)}"
                    )
                if not bool(((value >= 0) & value.isfinite()).all()):
                    fail(f"{key} has entries that are negative or not finite")
            elif key in self.moments:
                dtype = self.moments[key] if coded else torch.float32
                if value.dtype != dtype or value.shape != p.shape:
                    fail(
                        f"{key} must be {dtype} of shape {tuple(p.shape)}, got {value.dtype} of shape "
                        f"{tuple(value.shape)}"
                    )
                if coded and not same_layout(value, p):
                    # Another memory format cuts other blocks.
                    fail(f"{key} must have strides {p.stride()} like its parameter, got {value.stride()}")


class _Held:
    """A tensor that torch's load_state_dict does not see."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def takes_8bit_state(p: Tensor, group: dict[str, Any]) -> bool:
    """Whether a parameter's moments are stored in 8 bits: the group asks for it and the tensor is large enough."""
    least = group["min_8bit_size"] * (MIN_1D_FACTOR if p.dim() <= 1 else 1)
    return group["state_bits"] == 8 and p.numel() >= least
