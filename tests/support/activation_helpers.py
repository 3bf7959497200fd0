"""For the tests of activations: every activation with torch's own beside it, layouts, values around thresholds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memkern import functional, nn
from memkern.fewbit.activations import SELU_ALPHA, SELU_SCALE
from memkern.fewbit.levels import Levels, elu_levels, hardtanh_levels, relu_levels, shrink_levels
from memkern.fewbit.make_tables import DERIVATIVES
from memkern.fewbit.tables import LEVELS
from tests.support.helpers import hard


class Activation(NamedTuple):
    """An activation of memkern beside torch's; calling it calls ``ours`` with the arguments that ``ours`` has."""

    ours: Callable[..., Tensor]  # memkern's function
    torch: Callable[..., Tensor]  # torch's function
    module: Callable[..., torch.nn.Module]  # makes memkern's module
    table: Callable[[int], Levels]  # takes a number of bits, returns the levels of the derivative
    has_bits: bool = True  # whether it has an option ``bits``; without it, one bit gives the exact derivative
    inplace: bool = False  # whether both can write into x

    def __call__(self, x: Tensor, bits: int = 3, inplace: bool = False) -> Tensor:
        options: dict[str, Any] = {"bits": bits} if self.has_bits else {}
        return self.ours(x, **options, **({"inplace": True} if inplace else {}))


def _shipped(name: str, factor: float = 1.0) -> Callable[[int], Levels]:
    return lambda bits: LEVELS[name, bits].scaled(factor)


def _elu(alpha: float, scale: float = 1.0, factor: float = 1.0) -> Callable[[int], Levels]:
    return lambda bits: elu_levels(LEVELS["elu", bits], alpha, scale).scaled(factor)


def _with_arguments(fn: Callable[..., Tensor], *args: Any) -> Callable[..., Tensor]:
    return lambda x, **options: fn(x, *args, **options)


def _of(ours: Any, torchs: Any, module: Any, table: Callable[[int], Levels], *args: float, **flags: bool) -> Activation:
    """An activation whose function takes ``args`` after x, as torch's function does in the same order."""
    functions = (_with_arguments(fn, *args) for fn in (ours, torchs))
    return Activation(*functions, functools.partial(module, *args), table, **flags)


f = functional
ACTIVATIONS = {
    "gelu": Activation(f.gelu, F.gelu, nn.GELU, _shipped("gelu")),
    "gelu tanh": Activation(
        _with_arguments(f.gelu, "tanh"),
        lambda x: F.gelu(x, approximate="tanh"),
        lambda **o: nn.GELU("tanh", **o),
        _shipped("gelu_tanh"),
    ),
    "silu": Activation(f.silu, F.silu, nn.SiLU, _shipped("silu"), inplace=True),
    "tanh": Activation(f.tanh, torch.tanh, nn.Tanh, _shipped("tanh")),
    "sigmoid": Activation(f.sigmoid, torch.sigmoid, nn.Sigmoid, _shipped("sigmoid")),
    "softplus": Activation(f.softplus, F.softplus, nn.Softplus, _shipped("softplus")),
    "softplus 2, 4": _of(f.softplus, F.softplus, nn.Softplus, _shipped("softplus", 2.0), 2.0, 4.0),
    "mish": Activation(f.mish, F.mish, nn.Mish, _shipped("mish"), inplace=True),
    "hardswish": Activation(f.hardswish, F.hardswish, nn.Hardswish, _shipped("hardswish"), inplace=True),
    "quick_gelu": Activation(
        f.quick_gelu, lambda x: x * torch.sigmoid(1.702 * x), nn.QuickGELU, _shipped("quick_gelu")
    ),
    "elu": Activation(f.elu, F.elu, nn.ELU, _elu(1.0), inplace=True),
    "elu 0.3": _of(f.elu, F.elu, nn.ELU, _elu(0.3), 0.3, inplace=True),
    "celu": Activation(f.celu, F.celu, nn.CELU, _elu(1.0), inplace=True),
    "celu 2": _of(f.celu, F.celu, nn.CELU, _elu(1.0, factor=0.5), 2.0, inplace=True),
    "selu": Activation(f.selu, F.selu, nn.SELU, _elu(SELU_ALPHA, SELU_SCALE), inplace=True),
    "logsigmoid": Activation(
        f.logsigmoid, F.logsigmoid, nn.LogSigmoid, lambda bits: LEVELS["softplus", bits].one_minus()
    ),
    "softsign": Activation(f.softsign, F.softsign, nn.Softsign, _shipped("softsign")),
    "tanhshrink": Activation(f.tanhshrink, F.tanhshrink, nn.Tanhshrink, lambda bits: LEVELS["tanh", bits].one_minus()),
    "relu": Activation(f.relu, F.relu, nn.ReLU, lambda bits: relu_levels(), False, True),
    "leaky_relu": Activation(f.leaky_relu, F.leaky_relu, nn.LeakyReLU, lambda bits: relu_levels(0.01), False, True),
    "hardtanh": Activation(f.hardtanh, F.hardtanh, nn.Hardtanh, lambda bits: hardtanh_levels(-1, 1), False, True),
    "hardtanh 0, 6": _of(
        f.hardtanh, F.hardtanh, nn.Hardtanh, lambda bits: hardtanh_levels(0, 6), 0.0, 6.0, has_bits=False, inplace=True
    ),
    "hardsigmoid": Activation(
        f.hardsigmoid, F.hardsigmoid, nn.Hardsigmoid, lambda bits: hardtanh_levels(-3, 3, 1 / 6), False, True
    ),
    "hardshrink": Activation(f.hardshrink, F.hardshrink, nn.Hardshrink, lambda bits: shrink_levels(0.5), False),
    "softshrink": Activation(f.softshrink, F.softshrink, nn.Softshrink, lambda bits: shrink_levels(0.5), False),
    "softshrink 1.1": _of(
        f.softshrink, F.softshrink, nn.Softshrink, lambda bits: shrink_levels(1.1), 1.1, has_bits=False
    ),
    "threshold": _of(
        *(f.threshold, F.threshold, nn.Threshold, lambda bits: relu_levels(threshold=0.25), 0.25, -2.0),
        has_bits=False,
        inplace=True,
    ),
}
over_activations = pytest.mark.parametrize("name", ACTIVATIONS)
over_bits = pytest.mark.parametrize("bits", [1, 2, 3, 4])

# Every shape of table: symmetric and not, no threshold and many, several planes flipped at once.
TABLES = {
    **{f"{name} {bits}": LEVELS[name, bits] for name in DERIVATIVES for bits in (1, 2, 3, 4)},
    "relu": relu_levels(),
    "hardtanh": hardtanh_levels(-1.0, 1.0),
    "softshrink": shrink_levels(0.5),
    "nothing": Levels(1, (0.5, 0.5), (), ()),
    "sign": Levels(4, (0.5,) * 16, (), (), 2),
    "sign and threshold in one plane": Levels(2, (0.0, 0.2, 0.4, 0.6), (0.1, 0.5), (1, 2), 2),
    "many": Levels(4, tuple(i / 16 for i in range(16)), tuple(i / 8 - 4 for i in range(64)), (15, 6, 9, 3) * 16),
}

LAYOUTS: dict[str, Callable[[Callable[..., Tensor]], Tensor]] = {
    "0-dim": lambda new: new(),
    "one element": lambda new: new(1),
    "empty": lambda new: new(3, 0),
    "odd": lambda new: new(37, 53),
    "a word less": lambda new: new(127),
    "a group": lambda new: new(128),
    "a group and one": lambda new: new(3, 43),
    "channels_last": lambda new: new(4, 9, 5, 3).contiguous(memory_format=torch.channels_last),
    "permuted": lambda new: new(5, 7, 60).permute(1, 2, 0),
    "unaligned": lambda new: new(33 * 131 + 1)[1:].view(33, 131),
}
STRIDED: dict[str, Callable[[Callable[..., Tensor]], Tensor]] = {
    "every second": lambda new: new(40, 74)[:, ::2],
    "a slice": lambda new: new(9, 33, 17)[:, 3:20],
    "expanded": lambda new: new(33, 1).expand(33, 40),
    "a transposed slice": lambda new: new(40, 74)[:, 5:30].t(),
}
over_layouts = pytest.mark.parametrize("layout", LAYOUTS)


def values(layout: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """N(0, 4) with zeros, denormals and infinities, in one of the layouts."""

    def new(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2
        flat = x.view(-1)
        for i, value in enumerate((0.0, -0.0, 1e-42, -1e-42, 1e30, -1e30, torch.inf, -torch.inf)):
            flat[i * 11 : i * 11 + 1] = value
        return x.to(dtype)

    return (LAYOUTS | STRIDED)[layout](new)


def around(table: Levels) -> Tensor:
    """Each threshold, its neighbours in fp32, and their negatives."""
    t = torch.tensor([*table.thresholds, 0.0])
    up, down = torch.full_like(t, torch.inf), torch.full_like(t, -torch.inf)
    near = torch.cat([t, t.nextafter(up), t.nextafter(down)])
    return torch.cat([near, -near, torch.tensor([torch.nan, torch.inf, -torch.inf])])


def gradients(fn: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output and input gradient, for ``grad`` or hard values as the output's gradient."""
    x = x.detach().requires_grad_()
    y = fn(x)
    if grad is None:
        grad = hard(y.shape, 7, scale=1.0).to(y)
    (dx,) = torch.autograd.grad(y, x, grad)
    return y.detach(), dx
