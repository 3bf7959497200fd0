"""Trains some steps on a backend: the variants, states and gradients with which tests compare the bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.helpers import at, on, set_grad, skip_other_norms, snapshot
from tests.support.optimizers import LAYERWISE, cases

VARIANTS = cases("variants")
STATES = {
    "power": {"state_bits": 8, "codec": "power"},
    "dynamic": {"state_bits": 8, "codec": "dynamic"},
    "fp32": {"state_bits": 32},
}


def with_random_nonfinite(g: Tensor, seed: int) -> Tensor:
    """g, in which NaN and both infinities are written to random places, each to 0.5 % of them."""
    random = torch.rand(g.shape, generator=torch.Generator().manual_seed(seed))
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        g[(random > i * 0.01) & (random < i * 0.01 + 0.005)] = value
    return g


def trained(
    backend: str,
    build: type,
    options: dict[str, Any],
    params: list[Tensor],
    gradient: Callable[[Tensor, int], Tensor],
    steps: int = 3,
) -> dict[str, Any]:
    """The parameters and states after some steps from copies of `params`."""
    if build in LAYERWISE:
        skip_other_norms(backend)
    params = [torch.nn.Parameter(at(p, backend)) for p in params]
    optimizer = build(params, min_8bit_size=0, **options)
    with on(backend):
        for step in range(1, steps + 1):
            for i, p in enumerate(params):
                set_grad(p, at(gradient(p.detach().cpu(), 100 * step + i), backend))
            optimizer.step()
    return snapshot(optimizer)
