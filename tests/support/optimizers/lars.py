"""LARS for the tests: the LAMB paper's formula and the classic one, and test cases (OptimizerSpec in spec.py)."""

from __future__ import annotations

from torch import Tensor

from .spec import (
    BAD_BOUNDS,
    BAD_EPS,
    BAD_MOMENTUM,
    LAYERED,
    OptimizerSpec,
    Options,
    adapts,
    phi,
    sgd_direction,
    trust_ratio,
)


def lars(p: Tensor, g: Tensor, state: Options, group: Options) -> Tensor:
    """Algorithm 1 of arXiv 1904.00962; with a trust_coeff the classic form."""
    if group["trust_coeff"] is not None:
        return classic(p, g, state, group)
    momentum = group["momentum"]
    d = (1 - momentum) * (g + group["weight_decay"] * p)
    state["exp_avg"] = m = momentum * state.get("exp_avg", 0) + d
    return p - float(group["lr"]) * trust_ratio(p, m, group) * m


def classic(p: Tensor, g: Tensor, state: Options, group: Options) -> Tensor:
    """The update of arXiv 1708.03888 on top of torch.optim.SGD's, with timm.optim.Lars's options."""
    lr, decay, ratio = float(group["lr"]), group["weight_decay"], 1.0
    norm = phi(p, group)
    if adapts(group) and norm and g.norm():
        ratio = float(group["trust_coeff"] * norm / (g.norm() + decay * norm + group["eps"]))
        if group["trust_clip"]:
            ratio = min(ratio / lr, 1.0)
    return p - lr * sgd_direction(ratio * (g + decay * p), state, group, "exp_avg")


CLASSIC = {"trust_coeff": 1e-3, "lr": 0.5}

LARS = OptimizerSpec(
    "LARS",
    lars,
    lr=1e-3,
    generic={
        "momentum": {"momentum": 0.5, "trust_clip": True, "always_adapt": True},
        "bounds": {"trust_bounds": (4.0, 6.0), "weight_decay": 0.1},
        "classic": {"trust_coeff": 1e-2, "lr": 0.1},
        "classic, bounds": {"trust_coeff": 1e-2, "lr": 0.1, "trust_bounds": (4.0, 6.0), "weight_decay": 0.1},
        "dampening": {"trust_coeff": 1e-2, "dampening": 0.5, "lr": 0.1, "trust_clip": True},
        "nesterov": {"trust_coeff": 1e-2, "nesterov": True, "weight_decay": 0.1, "lr": 0.1},
    },
    variants={
        "": {"lr": 1e-2, "weight_decay": 0.1},
        "classic": {
            "lr": 0.5,
            "trust_coeff": 1e-2,
            "momentum": 0.8,
            "nesterov": True,
            "always_adapt": True,
            "weight_decay": 0.0,
        },
        "classic, clipped": {"lr": 1e-2, "trust_coeff": 1e-3, "dampening": 0.3, "trust_clip": True, "maximize": True},
    },
    of_timm={  # which has the classic form alone
        "classic": {"lr": 1.0, "weight_decay": 1e-4, "trust_coeff": 1e-2},
        "classic, nesterov": {
            "lr": 1.0,
            "weight_decay": 1e-3,
            "trust_coeff": 1e-2,
            "nesterov": True,
            "momentum": 0.8,
        },
        "classic, clipped": {
            "lr": 1e-2,
            "weight_decay": 1e-4,
            "trust_coeff": 1e-2,
            "trust_clip": True,
            "dampening": 0.5,
        },
        "classic, no decay, adapted": {"lr": 1.0, "weight_decay": 0.0, "trust_coeff": 1e-2, "always_adapt": True},
    },
    timm="Lars",
    timm_options={"momentum": 0.9},
    refused=[
        *BAD_BOUNDS,
        *BAD_EPS,
        *BAD_MOMENTUM,
        ({"dampening": 1.5, "trust_coeff": 1e-3}, "dampening must be from 0 to 1, got 1.5"),
        ({"dampening": 0.5}, "classic form: they need a trust_coeff"),
        ({"nesterov": True}, "classic form: they need a trust_coeff"),
        ({"nesterov": True, "trust_coeff": 1e-3, "momentum": 0.0}, "nesterov needs a momentum above 0"),
        (
            {"nesterov": True, "trust_coeff": 1e-3, "dampening": 0.5},
            "nesterov needs a momentum above 0 and no dampening",
        ),
        ({"trust_coeff": 0.0}, "trust_coeff must be None or above 0 and finite, got 0.0"),
        ({"trust_coeff": -1.0}, "trust_coeff must be None or above 0"),
    ],
    hashed={
        "trust clip": {"trust_clip": True},
        "always adapt": {"always_adapt": True, "weight_decay": 0.0},
        "classic": CLASSIC,
        "classic nesterov": {**CLASSIC, "nesterov": True},
        "classic dampening": {**CLASSIC, "dampening": 0.25},
        "classic trust clip": {**CLASSIC, "trust_clip": True},
        "classic no decay": {**CLASSIC, "weight_decay": 0.0},
        "classic maximize bf16": {**CLASSIC, "maximize": True, "dtype": "bf16"},
        "classic clipped": {**CLASSIC, "max_grad_norm": 0.5},
        "3 layers": {"layers": 3, **LAYERED},
        "classic rows": {**CLASSIC, "layers": "rows", **LAYERED, "layouts": ("6 layers",)},
    },
    everywhere=("lars norms: power, bf16",),
)
