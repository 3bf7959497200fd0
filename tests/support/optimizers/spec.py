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
Cases = dict[str, Options]  # the options of a class by the case's name, which is the end of a test's id
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
    """One optimizer and its test cases."""

    name: str  # the name of the class with 32-bit states
    formula: Formula  # takes (p, gradient, state, group), returns p after a step, and writes what it keeps to state
    lr: float  # the learning rate of all cases in fixtures/hashes.json
    options: Options = field(default_factory=dict)  # other options of all cases in fixtures/hashes.json

    generic: Cases = field(default_factory=dict)  # torch's generic tests run these cases and generic_optimizers.COMMON
    variants: Cases = field(default_factory=dict)  # every backend must give the reference's bits (support/trained.py)
    peer: type | None = None  # the class of torch.optim with the same formula; None where torch has none
    parity: Cases = field(default_factory=dict)  # the error against fp64 must be no larger than the peer's
    timm: str | None = None  # the name of the class of timm.optim with the same formula
    of_timm: Cases = field(default_factory=dict)  # parameters must become those of timm's class, within rounding
    timm_options: Options = field(default_factory=dict)  # options of timm's class alone, in each case of of_timm
    refused: list[tuple[Options, str]] = field(default_factory=list)  # options, a pattern of the ValueError's message

    hashed: Cases = field(default_factory=dict)  # cases in fixtures/hashes.json beside those of all optimizers

    triton: tuple[str, ...] = ()  # groups of variants of its Triton kernel to compile (lab/emulators/triton_kernels.py)
    everywhere: tuple[str, ...] = ()  # Triton kernels to compile for every target; the others are compiled for sm_90

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
        """The name of the optimizer's files in memkern, "adam" for AdamW too."""
        return self.op.name.removesuffix("_step_")

    @property
    def has_betas(self) -> bool:
        return "betas" in inspect.signature(self.cls).parameters

    def step(self, p: Tensor, g: Tensor, state: Options, group: Options) -> Tensor:
        """The parameter after a step, computed in its dtype. ``state`` is empty at first, and changed in place."""
        state["step"] = state.get("step", 0) + 1
        return self.formula(p, -g if group.get("maximize") else g, state, group)

    def peer_of(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        """An optimizer of the peer's class; where there is none, one that computes the formula in p's dtype."""
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
    """The direction of torch.optim.SGD's update, whose momentum is state[key]. d: the gradient plus weight decay."""
    momentum, m = group["momentum"], state.get(key)
    state[key] = m = d if m is None else momentum * m + (1 - group["dampening"]) * d
    return d + momentum * m if group["nesterov"] else m


def adapts(group: Options) -> bool:
    """Whether a group's layers have trust ratios other than 1."""
    return group["weight_decay"] != 0 or group["always_adapt"]


def phi(p: Tensor, group: Options) -> Tensor:
    """The norm of a layer's weights, clamped to the group's ``trust_bounds``."""
    return p.norm() if group["trust_bounds"] is None else p.norm().clamp(*group["trust_bounds"])


def trust_ratio(p: Tensor, update: Tensor, group: Options) -> float:
    """phi(|p|) / |update| of algorithms 1 and 2 of arXiv 1904.00962; 1 where a norm is 0."""
    norm = phi(p, group)
    if not adapts(group) or not norm or not update.norm():
        return 1.0
    ratio = float(norm / update.norm())
    return min(ratio, 1.0) if group["trust_clip"] else ratio
