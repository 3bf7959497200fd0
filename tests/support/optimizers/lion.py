"""Lion for the tests: the paper's formula, and test cases (OptimizerSpec in spec.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import TENSOR_BETAS, OptimizerSpec, Options, betas_of


def lion(p: Tensor, g: Tensor, state: Options, group: Options) -> Tensor:
    """Algorithm 2 of arXiv 2302.06675."""
    lr, (b1, b2) = float(group["lr"]), betas_of(group)
    m = state.get("exp_avg", torch.zeros_like(p))
    state["exp_avg"] = (b2 * m).add(g, alpha=1 - b2)
    return (p * (1 - lr * group["weight_decay"])).sub((b1 * m + (1 - b1) * g).sign(), alpha=lr)


LION = OptimizerSpec(
    "Lion",
    lion,
    lr=1e-4,
    generic={"tensor betas": TENSOR_BETAS},
    variants={
        "": {"lr": 1e-3, "weight_decay": 0.1},
        "maximize, no decay": {"maximize": True, "betas": (0.95, 0.98)},
    },
    parity={
        "": {"lr": 0.0123, "betas": (0.9, 0.99), "weight_decay": 0.1},
        "maximize": {"lr": 0.0123, "betas": (0.9, 0.99), "weight_decay": 0.1, "maximize": True},
    },
    triton=("all",),
    everywhere=("lion: power, bf16", "lion: prologue"),
)
