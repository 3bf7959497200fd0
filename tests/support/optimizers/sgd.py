"""SGD for the tests: torch.optim.SGD's formula, and test cases (OptimizerSpec in spec.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import BAD_MOMENTUM, OptimizerSpec, Options, sgd_direction


def sgd(p: Tensor, g: Tensor, state: Options, group: Options) -> Tensor:
    """The update of torch.optim.SGD."""
    d = g + group["weight_decay"] * p
    return p - float(group["lr"]) * sgd_direction(d, state, group, "momentum_buffer")


NESTEROV = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}

SGD = OptimizerSpec(
    "SGD",
    sgd,
    lr=1e-2,
    options={"momentum": 0.9},
    generic={
        "plain": {"momentum": 0.0},
        "dampening": {"momentum": 0.9, "dampening": 0.5},
        "nesterov": NESTEROV,
    },
    variants={
        "": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        "dampened, maximize": {"lr": 0.1, "momentum": 0.8, "dampening": 0.5, "maximize": True},
        "nesterov": {"lr": 0.1, **NESTEROV},
    },
    peer=torch.optim.SGD,
    parity={
        "": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
        "nesterov": {"lr": 0.1, **NESTEROV, "maximize": True},
    },
    refused=[
        *BAD_MOMENTUM,
        ({"dampening": 1.5}, "dampening must be from 0 to 1, got 1.5"),
        ({"dampening": 0.5, "momentum": 0.0}, "dampening needs a momentum above 0, got dampening 0.5"),
        ({"nesterov": True, "momentum": 0}, "nesterov needs a momentum above 0 and no dampening"),
        ({"nesterov": True, "dampening": 0.1}, "nesterov needs a momentum above 0 and no dampening"),
    ],
    hashed={
        "nesterov": {"nesterov": True, "weight_decay": 0.01},
        "dampening": {"dampening": 0.25},
        "no momentum": {"momentum": 0.0},
    },
)
