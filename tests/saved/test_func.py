"""torch.func over a model that saves in codes: its tensors are others around the saved ones, and have no storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkern
from memkern import memory

TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "vmap": lambda net, x: torch.vmap(net)(x[:, None]),
    "jvp": lambda net, x: torch.stack(torch.func.jvp(net, (x,), (x,))),
    "jacfwd": lambda net, x: torch.func.jacfwd(net)(x[:1]),
}


def gradients(transform: str, saved_bits: Any) -> list[Tensor | None]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    if saved_bits is not None:
        memkern.compress(net, saved_bits=saved_bits, activations=None)
    TRANSFORMS[transform](net, torch.linspace(-1, 1, 64 * 32).view(64, 32)).square().mean().backward()
    return [p.grad for p in net.parameters()]


@pytest.mark.parametrize("saved_bits", ["exact", 8])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_the_forward_pass(transform: str, saved_bits: Any) -> None:
    for found, expected in zip(gradients(transform, saved_bits), gradients(transform, None), strict=True):
        if expected is None or found is None:
            assert found is expected
        else:
            off = (found - expected).norm() / expected.norm()
            assert off <= (0 if saved_bits == "exact" else 0.01)


@pytest.mark.parametrize("saved_bits", ["exact", 8])
def test_a_default_device(saved_bits: Any) -> None:
    """Its function mode stands between a layer and its operation: weights' casts are no more saved than without."""

    def run() -> int:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 8))
        memkern.compress(net, saved_bits=saved_bits, activations=None)
        x = torch.randn(32, 64)

        def forward() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return net(x).float().square().mean()

        return memory.saved_bytes(forward, net, x)

    plain = run()
    with torch.device("cpu"):
        assert run() == plain
