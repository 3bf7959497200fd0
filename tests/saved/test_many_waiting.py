"""Many tensors whose users are not known yet."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import memkern
from memkern.saved.undecided import Undecided


def chain(steps: int, weight: Tensor) -> Tensor:
    """None of whose saved tensors has a user that decides, before the product at the end."""
    h = weight
    for _ in range(steps):
        h = F.silu(h)
    return (h @ torch.ones(64, 64)).sum()


def test_the_list_is_looked_through_when_it_has_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    look = Undecided.forget_the_dead
    monkeypatch.setattr(Undecided, "forget_the_dead", lambda self: (looks.append(1), look(self))[1])
    with memkern.quantize_saved(8):
        chain(3000, torch.randn(64, 64, requires_grad=True))
    assert len(looks) < 20
