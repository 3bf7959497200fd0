"""Convolutional nets through Inductor, which changes layouts: no copy of a weight is saved, and gradients are right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkern
from memkern import memory
from tests.support.helpers import first_full
from tests.support.partitioned import without_kernels


class Net(nn.Module):
    """Strided, grouped and pointwise convolutions. One runs twice, and two have weights that the loss uses directly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 64, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(64)
        self.grouped = nn.Conv2d(64, 64, 3, padding=1, groups=8)
        self.twice = nn.Conv2d(64, 64, 3, padding=1)
        self.last = nn.Conv2d(64, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x)).relu()
        y = self.twice(self.grouped(y).relu())
        y = self.last(self.twice(y) + self.first.weight.sum() * self.twice.weight.mean())
        return y.mean((2, 3))


def _step(net: nn.Module, call: Any, x: Tensor) -> dict[str, Tensor]:
    net.zero_grad()
    call(x).square().sum().backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def test_weights_are_not_saved_again() -> None:
    """Inductor's graphs, whose kernels are not compiled, save no more bytes than eager torch."""
    torch.manual_seed(0)
    net, x = Net(), torch.randn(1, 8, 16, 16)
    held = net, x
    eager = memory.saved_bytes(lambda: net(x), *held)
    weights = sum(4 * p.numel() for p in net.parameters())
    assert eager < weights
    with without_kernels():
        torch._dynamo.reset()
        call = memkern.compile(net)
        call(x)
        assert memory.saved_bytes(lambda: call(x), *held) <= eager


LAYOUTS = (torch.contiguous_format, torch.channels_last)
CASES = [("exact", LAYOUTS[1]), (8, LAYOUTS[0]), ("exact", LAYOUTS[0]), (8, LAYOUTS[1])]  # saved bits, layout


@pytest.mark.full
@pytest.mark.parametrize(("bits", "layout"), first_full(CASES), ids=str)
def test_gradients_are_near_eager_torchs(bits: Any, layout: Any) -> None:
    """Images have two sizes. A weight that is changed before the backward pass raises, as in eager torch."""
    torch.manual_seed(0)
    net = Net().to(memory_format=layout)
    plain = copy.deepcopy(net)
    torch._dynamo.reset()
    call = memkern.compile(net, saved_bits=bits, dynamic=True)
    for side in (16, 24):
        x = torch.randn(2, 8, side, side).to(memory_format=layout)
        expected, actual = _step(plain, plain, x), _step(net, call, x)
        for name, g in expected.items():
            assert (actual[name] - g).norm() < (1e-4 if bits == "exact" else 0.03) * g.norm() + 1e-6, name
            assert actual[name].stride() == g.stride()
    loss = call(x).square().sum()
    with torch.no_grad():
        net.last.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
