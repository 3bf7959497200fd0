"""A model with gates, norms and attention that is trained until it is right, with codes and without."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memkern


def _trained(bits: Any, seed: int) -> list[float]:
    """Losses of a model that learns to copy, until they are 1e-3."""
    torch.manual_seed(seed)
    width = 64

    class Copier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place = nn.Embedding(16, width), nn.Parameter(torch.randn(32, width) / 8)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.norm, self.gate, self.up = (
                nn.LayerNorm(width),
                nn.Linear(width, width),
                nn.Linear(width, width),
            )
            self.head = nn.Linear(width, 16)

        def forward(self, ids: Tensor, target: Tensor) -> Tensor:
            x = self.embed(ids) + self.place
            q, k, v = (t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            h = self.norm(x)
            a = torch.sigmoid(self.gate(h))
            x = a * torch.tanh(self.up(h)) + (1 - a) * x
            return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())

    model = Copier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(400):
        ids = torch.randint(16, (16, 32))
        with memkern.quantize_saved(bits) if bits else contextlib.nullcontext():
            loss = model(ids, ids.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "seed", [pytest.param(0, marks=pytest.mark.full), *(pytest.param(i, marks=pytest.mark.long) for i in (1, 2))]
)
def test_training_until_the_loss_is_small(seed: int) -> None:
    plain, coded = _trained(None, seed), _trained(8, seed)
    assert plain[-1] < 2e-3
    assert abs(coded[-1] / plain[-1] - 1) < 0.1
