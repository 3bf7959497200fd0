"""For the tests of the converters of optimizer states: parameters of many shapes, training, comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkern import dequantize_blockwise

State = dict[str, Any]

# Rows whose length is a multiple of 256, a divisor of 256, and neither; one row; 1-D, large and small; other strides;
# a scalar.
SHAPES: dict[str, Callable[[], Tensor]] = {
    "long_rows": lambda: torch.randn(10, 512),
    "short_rows": lambda: torch.randn(200, 64),
    "odd_rows": lambda: torch.randn(40, 300),
    "odd_short_rows": lambda: torch.randn(150, 48),
    "one_row": lambda: torch.randn(1, 5001),
    "flat": lambda: torch.randn(70000),
    "bias": lambda: torch.randn(300),
    "channels_last": lambda: torch.randn(16, 32, 3, 3).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(64, 96).t(),
    "one": lambda: torch.randn(()),
}
# Shapes whose blocks of 256 are bitsandbytes': 256 consecutive elements.
SAME_BLOCKS = {"long_rows", "short_rows", "one_row", "flat"}
HYPER: State = {"lr": 3e-3, "betas": (0.8, 0.97), "eps": 1e-7, "weight_decay": 0.1}
OPTIONS: dict[str, State] = {
    "power": {"state_bits": 8},
    "dynamic256": {"state_bits": 8, "codec": "dynamic", "block_size": 256},
    "dynamic64": {"state_bits": 8, "codec": "dynamic", "block_size": 64},
    "fp32": {"state_bits": 32},
}
over_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(make().to(dtype)) for make in SHAPES.values()]


def copies_of(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params]


def give_gradients(params: list[nn.Parameter], seed: int, *others: list[nn.Parameter]) -> None:
    """Random gradients, the same for the parameters of each list."""
    generator = torch.Generator().manual_seed(seed)
    for same_params in zip(params, *others, strict=True):
        grad = torch.randn(same_params[0].shape, generator=generator).to(same_params[0].dtype)
        for p in same_params:
            p.grad = torch.empty_like(p).copy_(grad)


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int, first: int = 0) -> None:
    for seed in range(first, first + steps):
        give_gradients(params, seed)
        optimizer.step()


def value(state: dict[str, Tensor], name: str, group: State) -> Tensor:
    """The moment ``name`` of a parameter's state in a memkern optimizer, decoded to floats."""
    if state[name].dtype == torch.float32:
        return state[name]
    x = dequantize_blockwise(state[name], state[f"{name}_scale"], codec=group["codec"], block_size=group["block_size"])
    return x * x if name == "exp_avg_sq" and group["codec"] == "power" else x


def assert_steps_agree(
    a: torch.optim.Optimizer,
    params_a: list[nn.Parameter],
    b: torch.optim.Optimizer,
    params_b: list[nn.Parameter],
) -> None:
    """One more step of two optimizers with the same moments differs by a few fp32 roundings of the update."""
    before = [p.detach().clone() for p in params_a]
    give_gradients(params_a, 99, params_b)
    a.step()
    b.step()
    for old, x, y in zip(before, params_a, params_b, strict=True):
        bound = 1e-6 * (old.abs() + 10 * HYPER["lr"])  # 8 roundings of 2^-23 of the weight and of an update of 10 lr
        assert bool(((x - y).abs() <= bound).all())
        assert not torch.equal(x, old)


DROP = object()  # a value of with_value_at() that removes the entry


def with_value_at(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of nested dicts and lists in which ``value`` is at the place of these keys, or nothing if it is DROP."""
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    key, *inner_path = path
    if inner_path:
        copy[key] = with_value_at(copy[key], tuple(inner_path), value)
    elif value is DROP:
        del copy[key]
    else:
        copy[key] = value
    return copy
