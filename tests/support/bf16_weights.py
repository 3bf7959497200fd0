"""bf16 parameters for tests, and the options that keep their rounding errors or round them stochastically.

A test that is marked with ``over_master_weights`` runs for each kind of kept errors, and one with ``over_options`` for
each of these and with stochastic rounding.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from memkern import optim
from tests.support.helpers import make_params

BF16 = torch.bfloat16
MASTER_WEIGHTS = ("bf16+16", "bf16+8")
OPTIONS: dict[str, dict[str, Any]] = {
    **{master_weights: {"master_weights": master_weights} for master_weights in MASTER_WEIGHTS},
    "stochastic": {"stochastic_rounding": True},
}
over_master_weights = pytest.mark.parametrize("master_weights", MASTER_WEIGHTS)
over_options = pytest.mark.parametrize("option", OPTIONS)


def bf16_params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().to(BF16)) for p in make_params()]


def fp32_weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [
        optim.weights.fp32_weight(p, optimizer.state.get(p, {}))
        for group in optimizer.param_groups
        for p in group["params"]
    ]
