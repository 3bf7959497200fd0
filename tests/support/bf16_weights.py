"""bf16 parameters for tests, and the options that keep their rounding errors or round them stochastically."""

from typing import Any

import pytest
import torch
from torch import Tensor

from memkern import optim
from tests.support.helpers import make_params

BF16 = torch.bfloat16
KEPT: dict[str, dict[str, Any]] = {
    "bf16+16": {"master_weights": "bf16+16"},
    "bf16+8": {"master_weights": "bf16+8"},
}
OPTIONS = {**KEPT, "stochastic": {"stochastic_rounding": True}}
over_kept = pytest.mark.parametrize("kept", KEPT)
over_options = pytest.mark.parametrize("option", OPTIONS)


def bf16_params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().to(BF16)) for p in make_params()]


def fp32_weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [
        optim.weights.fp32_weight(p, optimizer.state.get(p, {}))
        for group in optimizer.param_groups
        for p in group["params"]
    ]
