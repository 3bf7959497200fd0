"""bf16 weights for tests: what may be kept beside them, and a few steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from memkern import optim
from tests.support.helpers import hard, like, snapshot

BF16 = torch.bfloat16
KEPT: dict[str, dict[str, Any]] = {
    "bf16+16": {"master_weights": "bf16+16"},
    "bf16+8": {"master_weights": "bf16+8"},
}
OPTIONS = {**KEPT, "stochastic": {"stochastic_rounding": True}}
over_kept = pytest.mark.parametrize("kept", KEPT)
over_options = pytest.mark.parametrize("option", OPTIONS)
SHAPES = [(64, 128), (10, 10), (300,)]


def bf16_params(seed: int = 0) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(hard(shape, seed + i, scale=0.1).to(BF16)) for i, shape in enumerate(SHAPES)]


def train(optimizer: torch.optim.Optimizer, steps: int = 3, first: int = 0, scale: float = 1e-3) -> Any:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, first + steps):
        for i, p in enumerate(params):
            p.grad = like(p, 1000 * step + i, scale=scale)
        optimizer.step()
    return snapshot(optimizer)


def fp32_weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [
        optim.weights.fp32_weight(p, optimizer.state.get(p, {}))
        for group in optimizer.param_groups
        for p in group["params"]
    ]
