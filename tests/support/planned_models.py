"""Small models for the tests of memkern.planner, and the planner's Predictor for a model."""

from typing import Any

import torch
from torch import nn

from memkern.planner.hardware import DEFAULTS
from memkern.planner.models import resolve
from memkern.planner.prediction import ON_CPU_TENSORS, Predictor

WIDTH, DEPTH = 64, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


class Stack(nn.Module):
    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def predictor_of(model: nn.Module, inputs: Any, device: str = "cpu", devices: int = 1, loss: Any = None) -> Predictor:
    """The planner's Predictor for training a model with ``inputs`` and ``loss``, as memkern.plan takes them.

    device: "cpu" or "cuda". A step for "cuda" is counted on fake CPU tensors, which need no compiled fake CUDA.
    devices: the number of devices over which fully_shard would shard the model.
    """
    counted_on = "cpu" if device == "cpu" else ON_CPU_TENSORS
    return Predictor(resolve(model, None, inputs, loss, None), device, counted_on, DEFAULTS[device], devices)
