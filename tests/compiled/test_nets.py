"""Parts of convolutional nets in 8 bits: bytes over eager torch's, and the error of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memkern import memory
from tests.support.partitioned import backend


class Gated(nn.Module):
    """Squeeze and excitation: a number in [0, 1] for each channel, whose rows share blocks of codes."""

    def __init__(self, gate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.norm, self.gate = nn.Conv2d(16, 64, 1, bias=False), nn.BatchNorm2d(64), gate
        self.squeeze, self.after = nn.Conv2d(64, 64, 1), nn.Conv2d(64, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.before(x)))
        return self.after(y * self.gate(self.squeeze(y.mean((2, 3), keepdim=True))))


class Scaled(nn.Module):
    """ConvNeXt's: weights of channels that a residual is multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Conv2d(16, 64, 1), nn.Conv2d(64, 16, 1)
        self.scale = nn.Parameter(torch.rand(64, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x) * self.scale)


class Up(nn.Module):
    """Of a UNet: a skip connection whose norm and shortcut use the concatenation, after an enlargement."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.skip = nn.Conv2d(16, 32, 1), nn.Conv2d(16, 32, 3, padding=1)
        self.smooth = nn.Conv2d(32, 32, 3, padding=1)
        self.norm, self.inner, self.shortcut = (
            nn.GroupNorm(8, 64),
            nn.Conv2d(64, 32, 3, padding=1),
            nn.Conv2d(64, 32, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        small = F.avg_pool2d(F.silu(self.first(x)), 2)
        large = self.smooth(F.interpolate(small, scale_factor=2.0, mode="nearest"))
        y = torch.cat((large, self.skip(x)), 1)
        return self.inner(F.silu(self.norm(y))) + self.shortcut(y)


def _stage(activation: Callable[[Tensor], Tensor]) -> nn.Module:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = (
                nn.Conv2d(16, 64, 1, bias=False),
                nn.BatchNorm2d(64),
                nn.Conv2d(64, 16, 1),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.last(activation(self.norm(self.first(x))))

    return Stage()


def _step(net: nn.Module, call: Any, x: Tensor) -> tuple[int, Tensor]:
    """Saved bytes, and all gradients as one vector."""
    found: list[Tensor] = []
    count = memory.saved_bytes(lambda: found.append(call(x)), net, x)
    net.zero_grad()
    (found[0] ** 2).sum().backward()
    return count, torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def _shares(net: nn.Module) -> tuple[float, float]:
    """Bytes over eager torch's, and how far gradients are off."""
    x = torch.randn(2, 16, 14, 14, generator=torch.Generator().manual_seed(1))
    torch._dynamo.reset()
    eager, expected = _step(net, net, x)
    coded, found = _step(net, torch.compile(net, backend=backend(8)), x)
    return coded / eager, float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda: Gated(torch.sigmoid), 0.2),
        (lambda: Gated(F.hardsigmoid), 0.2),
        (Scaled, 0.35),
        (Up, 0.2),
    ],
    ids=["sigmoid", "hardsigmoid", "scale", "up"],
)
def test_parts_are_coded(make: Callable[[], nn.Module], most: float) -> None:
    torch.manual_seed(0)
    share, off = _shares(make())
    assert share < most
    assert off < 0.03


@pytest.mark.parametrize("name", ["silu", "mish", "hardswish", "leaky_relu", "elu", "relu", "hardtanh"])
def test_activations_in_place_save_as_much_as_others(name: str) -> None:
    function: Any = getattr(F, name)
    shares = []
    for inplace in (False, True):
        torch.manual_seed(0)
        net = _stage(lambda y, inplace=inplace: function(y, inplace=inplace))
        x = torch.randn(2, 16, 14, 14, generator=torch.Generator().manual_seed(1))
        torch._dynamo.reset()
        count, found = _step(net, torch.compile(net, backend=backend(8)), x)
        expected = _step(net, net, x)[1]
        assert (found - expected).norm() < 0.03 * expected.norm()
        shares.append(count)
    assert shares[0] == shares[1]
