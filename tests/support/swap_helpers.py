"""Models that the tests of memkern.compress share."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

# The predicate of memkern.compress that takes every module.
EVERY = lambda name, module: True  # noqa: E731


class MLP(nn.Module):
    """Linear, activation, linear, under transformers' names."""

    def __init__(self, act: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.c_fc, self.c_proj, self.act = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), act

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x)))


class CallsGelu(nn.Module):
    """A module that calls F.gelu as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x))
