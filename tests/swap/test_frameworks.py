"""compress of models that few-bit activations do not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memkern
from memkern.nn import RandomizedLinear


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)).double()


@pytest.mark.parametrize("activations", [3, "output"])
def test_float64_models_are_refused_before_anything_changes(activations: Any) -> None:
    net = model()
    with pytest.raises(ValueError, match=f"activations must be None for a float64 model.*got {activations!r}"):
        memkern.compress(net, activations=activations, linear=0.5, embeddings=True)
    assert [type(m) for m in net] == [torch.nn.Linear, torch.nn.GELU, torch.nn.Linear]


def test_what_float64_models_can_have() -> None:
    net, x = model(), torch.randn(200, 8, dtype=torch.float64)
    y = net(x)
    memkern.compress(net, None, linear={"share": 0.5, "min_tokens": 0})
    assert isinstance(net[0], RandomizedLinear)
    found = net(x)
    torch.testing.assert_close(found, y, rtol=1e-12, atol=1e-12)
    found.sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())
