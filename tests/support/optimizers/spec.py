"""OptimizerSpec: an optimizer's formula, peers, options and test cases, which the tests of all optimizers read."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memkern import optim
from memkern.schemas import StepOp

Options = dict[str, Any]
Formula = Callable[[Tensor, Tensor, Options, Options], Tensor]

EIGHT = {"state_bits": 8, "min_8bit_size": 0}  # 8-bit states for small tensors too
TENSOR_BETAS = {"betas": (torch.tensor(0.9), torch.tensor([[0.99]])), "lr": torch.tensor(1e-3)}
LAYERED: Options = {"layouts": ("6 layers", "3 layers"), "weight_decay": 0.01}

BAD_EPS: list[tuple[Options, str]] = [
    ({"eps": -1e-8}, "eps must be 0 or more"),
    ({"eps": float("nan")}, "eps must be 0 or more"),
    ({"eps": float("inf")}, "eps must be 0 or more and finite"),
]
BAD_MOMENTUM: list[tuple[Options, str]] = [
    ({"momentum": 1.0}, "momentum must be from 0 to below 1, got 1.0"),
    ({"momentum": -0.1}, "momentum must be from 0 to below 1, got -0.1"),
    ({"momentum": float("nan")}, "momentum must be from 0 to below 1, got nan"),
    ({"momentum": "0.9"}, "momentum must be from 0 to below 1, got '0.9'"),
]
_NAN = float("nan")
BAD_BOUNDS: list[tuple[Options, str]] = [
    ({"trust_bounds": bounds}, r"trust_bounds must be None or \(low, high\), .* got ")
    for bounds in (1.0, (1.0,), (2.0, 1.0), (1.0, 1.0), (-1.0, 1.0), (_NAN, 1.0), (0.0, _NAN), ("0", "1"), (0, 1, 2))
]


@dataclass(frozen=True, eq=False)
class OptimizerSpec:
    """One optimizer. Cases map a name, which is the end of a test's id, to the options of the class."""

    name: str  # of the class with 32-bit states
    formula: Formula  # (p, gradient, state, group) -> p after a step; it keeps what it needs in state
    lr: float  # of fixtures/hashes.json
    options: Options = field(default_factory=dict)  # of fixtures/hashes.json

    generic: dict[str, Options] = field(default_factory=dict)  # torch's generic tests, beside COMMON
    variants: dict[str, Options] = field(default_factory=dict)  # with which every backend gives the reference's bits
    peer: type | None = None  # torch's optimizer; without one the formula in the parameters' dtype
    parity: dict[str, Options] = field(default_factory=dict)  # with which it is no further from fp64 than the peer
    timm: str | None = None  # the class of timm.optim
    of_timm: dict[str, Options] = field(default_factory=dict)  # with which it moves parameters as timm's class does
    timm_options: Options = field(default_factory=dict)
    refused: list[tuple[Options, str]] = field(default_factory=list)  # options, and the error's message

    hashed: dict[str, Options] = field(default_factory=dict)  # fixtures/hashes.json, beside the common cases

    triton: tuple[str, ...] = ()  # variants of its Triton kernel that are compiled, beside COMMON
    everywhere: tuple[str, ...] = ()  # variants of its Triton kernels that are compiled for every target

    @property
    def cls(self) -> Any:
        return getattr(optim, self.name)

    @property
    def cls8bit(self) -> Any:
        return getattr(optim, f"{self.name}8bit")

    @property
    def op(self) -> StepOp:
        op: StepOp = self.cls.op
        return op

    @property
    def family(self) -> str:
        """The name of its files: adam for AdamW too."""
        return self.op.name.removesuffix("_step_")

    @property
    def has_betas(self) -> bool:
        return "betas" in inspect.signature(self.cls).parameters

    def step(self, p: Tensor, g: Tensor, state: Options, group: Options) -> Tensor:
        """A parameter after a step in its own dtype. ``state`` is empty at first and changed in place."""
        state["step"] = state.get("step", 0) + 1
        return self.formula(p, -g if group.get("maximize") else g, state, group)

    def peer_of(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        return self.peer(params, **options) if self.peer else FormulaOptimizer(self, params, **options)


class FormulaOptimizer(torch.optim.Optimizer):
    """A spec's formula as an optimizer, in the dtype of its parameters."""

    def __init__(self, spec: OptimizerSpec, params: Any, **options: Any) -> None:
        super().__init__(params, {**spec.cls([torch.empty(1)]).defaults, **options})
        self.spec = spec

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.spec.step(p, p.grad, self.state[p], group))


def betas_of(group: Options) -> tuple[float, float]:
    b1, b2 = group["betas"]
    return float(b1), float(b2)


def adam_direction(g: Tensor, state: Options, group: Options) -> Tensor:
    """m / (sqrt(v) + eps) after the update of both moments."""
    b1, b2 = betas_of(group)
    state["exp_avg"] = m = b1 * state.get("exp_avg", 0) + (1 - b1) * g
    state["exp_avg_sq"] = v = b2 * state.get("exp_avg_sq", 0) + (1 - b2) * g * g
    if group.get("amsgrad"):
        state["max_exp_avg_sq"] = v = torch.maximum(v, state.get("max_exp_avg_sq", v))
    if group.get("bias_correction", True):
        m, v = m / (1 - b1 ** state["step"]), v / (1 - b2 ** state["step"])
    return m / (v.sqrt() + group["eps"])


def sgd_direction(d: Tensor, state: Options, group: Options, key: str) -> Tensor:
    """torch.optim.SGD's momentum, of gradients ``d`` with their weight decay."""
    momentum, m = group["momentum"], state.get(key)
    state[key] = m = d if m is None else momentum * m + (1 - group["dampening"]) * d
    return d + momentum * m if group["nesterov"] else m


def adapts(group: Options) -> bool:
    """Whether a group's layers have trust ratios other than 1."""
    return group["weight_decay"] != 0 or group["always_adapt"]


def phi(p: Tensor, group: Options) -> Tensor:
    """The norm of a layer's weights, within its bounds."""
    return p.norm() if group["trust_bounds"] is None else p.norm().clamp(*group["trust_bounds"])


def trust_ratio(p: Tensor, update: Tensor, group: Options) -> float:
    """phi(|p|) / |update| of algorithms 1 and 2 of arXiv 1904.00962; 1 where a norm is 0."""
    norm = phi(p, group)
    if not adapts(group) or not norm or not update.norm():
        return 1.0
    ratio = float(norm / update.norm())
    return min(ratio, 1.0) if group["trust_clip"] else ratio
