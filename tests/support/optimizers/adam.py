"""Adam and AdamW for the tests: the papers' formula, and test cases (OptimizerSpec in spec.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import BAD_EPS, TENSOR_BETAS, OptimizerSpec, Options, adam_direction


def adam(p: Tensor, g: Tensor, state: Options, group: Options) -> Tensor:
    """arXiv 1412.6980; with decoupled decay arXiv 1711.05101."""
    lr, decay = float(group["lr"]), group["weight_decay"]
    if group["decoupled_weight_decay"]:
        p = p * (1 - lr * decay)
    else:
        g = g + decay * p
    return p - lr * adam_direction(g, state, group)


GENERIC = {
    "tensor betas": TENSOR_BETAS,
    "amsgrad": {"weight_decay": 0.1, "amsgrad": True},
    "amsgrad, all": {"amsgrad": True, "capturable": True, "maximize": True, "lr": torch.tensor(1e-3)},
}
DECAY = {"lr": 1e-2, "weight_decay": 0.1}
KERNELS = {
    "triton": ("all",),
    "everywhere": ("adam: power, fp32", "adam: power, bf16", "adam: dynamic, fp32", "adam: prologue"),
}

ADAM = OptimizerSpec(
    "Adam",
    adam,
    lr=1e-3,
    generic={**GENERIC, "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True}},
    variants={"": DECAY, "maximize, no decay": {"maximize": True, "betas": (0.8, 0.95)}},
    peer=torch.optim.Adam,
    parity={
        "": {**DECAY, "betas": (0.8, 0.99)},
        "decoupled": {**DECAY, "decoupled_weight_decay": True},
        "maximize": {**DECAY, "maximize": True},
    },
    refused=BAD_EPS,
    hashed={"eps 1e-4": {"eps": 1e-4}},
    **KERNELS,
)

ADAMW = OptimizerSpec(
    "AdamW",
    adam,
    lr=1e-3,
    generic=GENERIC,
    variants={"": DECAY, "maximize, no decay": {"lr": 3e-3, "weight_decay": 0, "maximize": True, "eps": 1e-6}},
    peer=torch.optim.AdamW,
    parity={"": DECAY, "maximize": {**DECAY, "maximize": True}},
    refused=BAD_EPS,
    hashed={"eps 1e-4": {"eps": 1e-4}},
    **KERNELS,
)
