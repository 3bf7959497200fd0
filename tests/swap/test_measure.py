"""An example's forward passes leave the model's buffers as they were."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import memkern


class _Running(nn.Module):
    """Assigns one buffer, changes one in place, sets one that was None, and adds one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.steps += 1
        self.last = x.detach()
        if "first" not in self._buffers:
            self.register_buffer("first", x.detach())
        return x - self.mean


def test_buffers_that_a_forward_pass_assigns() -> None:
    model = nn.Sequential(_Running(), nn.Linear(8, 16), nn.GELU())
    before, buffers = copy.deepcopy(model.state_dict()), dict(model.named_buffers())
    memkern.compress(model, example=torch.randn(64, 8) + 3)
    assert model.state_dict().keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value)
    assert all(buffers[name] is buffer for name, buffer in model.named_buffers())
