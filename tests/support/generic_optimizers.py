"""Cases of torch's generic tests of optimizers (generic_tests.py): each class with options, and a small problem."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tests.support.optimizers import EIGHT, SPECS, Options

COMMON: dict[str, Options] = {
    "default": {},
    "lr": {"lr": 1e-2, "foreach": True},  # accepted and ignored
    "weight_decay": {"weight_decay": 0.1, "fused": True},
    "maximize": {"weight_decay": 0.1, "maximize": True},
    "tensor lr": {"lr": torch.tensor(1e-3)},
    "capturable": {"capturable": True},
    "max_grad_norm": {"max_grad_norm": 1.0},
    "8 bits": EIGHT,
    "dynamic": {**EIGHT, "codec": "dynamic", "block_size": 64, "maximize": True},
}
OF_8_BITS = ("default", "8 bits", "dynamic")  # the cases of the classes with 8-bit states
CASES = [
    *((spec.cls, name, options) for spec in SPECS.values() for name, options in (COMMON | spec.generic).items()),
    *((spec.cls8bit, name, COMMON[name]) for spec in SPECS.values() for name in OF_8_BITS),
]  # class, the options' name, options
# Those for tests of what the classes share: all of AdamW's, of each other class its own and one more.
SOME_CASES = [
    case
    for case in CASES
    if case[0].__name__.startswith("AdamW") or case[1] not in COMMON or case[1] in ("max_grad_norm", "8 bits")
]


def linear(dtype: torch.dtype = torch.float32, strided: bool = False) -> tuple[Parameter, Parameter, Tensor]:
    """A weight, a bias and an input; strided: every second element of a larger tensor."""
    if strided:
        weight, bias = torch.randn(10, 5, 2, dtype=dtype)[..., 0], torch.randn(10, 2, dtype=dtype)[..., 0]
    else:
        weight, bias = torch.randn(10, 5, dtype=dtype), torch.randn(10, dtype=dtype)
    return Parameter(weight), Parameter(bias), torch.randn(5, dtype=dtype)


def closure_of(optimizer: torch.optim.Optimizer, w: Tensor, b: Tensor, x: Tensor) -> Callable[[], Tensor]:
    """A closure for step(): the sum of squares of w x + b, with its gradients. ``.loss_of`` computes the loss alone."""

    def loss_of() -> Tensor:
        return (w.mv(x) + b).pow(2).sum()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    closure.loss_of = loss_of  # without a backward pass, in which StepInBackward steps
    return closure


def assert_right_direction(optimizer: torch.optim.Optimizer, closure: Callable[[], Tensor], up: bool = False) -> None:
    """Twenty steps decrease the loss, with ``up`` increase it."""
    loss_of = getattr(closure, "loss_of", closure)
    first = loss_of().item()
    for _ in range(20):
        optimizer.step(closure)
    last = loss_of().item()
    assert last > first if up else last < first


def clones(*params: Tensor) -> list[Parameter]:
    return [Parameter(p.detach().clone()) for p in params]


def named(params: list[Parameter], names: bool) -> Any:
    """The parameters, with ``names`` as (name, parameter)."""
    return [(f"name{i}", p) for i, p in enumerate(params)] if names else params


def saved_and_loaded(x: Any) -> Any:
    """x after torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
