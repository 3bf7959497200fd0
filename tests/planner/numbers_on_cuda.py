"""A model whose blocks make tensors of numbers, counted in a process with fake CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memkern.options import Techniques
from memkern.planner import fake_step
from memkern.planner.models import resolve

WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "a list": lambda x: x[..., [-2, 1]],
    "a range": lambda x: x[:, range(2)],
    "a mask": lambda x: x[[True, False, True, True]],
    "as_tensor": lambda x: x + torch.as_tensor([2.0], device=x.device),
    "new_tensor": lambda x: x + x.new_tensor(2.0),
    "tensor": lambda x: x.index_select(-1, torch.tensor([1, 2], device=x.device)),
}


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(64, 64), way

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        return y + WAYS[self.way](y).sum()


def saved(way: str, device: str) -> list[int]:
    """Bytes that a step saves, as it is and with checkpoints."""
    model = nn.Sequential(*(Block(way) for _ in range(3)))
    source = resolve(model, None, torch.zeros(4, 64), None, None)
    techniques: tuple[dict[str, Any], ...] = ({}, {"checkpointing": "blocks"})
    return [fake_step.trace(source, Techniques(micro_batch=4, **each), device).saved for each in techniques]


def all_ways() -> dict[str, list[int]]:
    return {way: saved(way, "cuda") for way in WAYS}
