"""LAMB for the tests: the paper's formula, and test cases (OptimizerSpec in spec.py)."""

from __future__ import annotations

from torch import Tensor

from .spec import BAD_BOUNDS, BAD_EPS, LAYERED, TENSOR_BETAS, OptimizerSpec, Options, adam_direction, trust_ratio


def lamb(p: Tensor, g: Tensor, state: Options, group: Options) -> Tensor:
    """Algorithm 2 of arXiv 1904.00962, with timm.optim.Lamb's options."""
    lr, decay = float(group["lr"]), group["weight_decay"]
    update = adam_direction(g, state, group)
    if group["decoupled_decay"]:
        p = p * (1 - lr * decay)
    else:
        update = update + decay * p
    return p - lr * trust_ratio(p, update, group) * update


DECAY = {"lr": 1e-2, "weight_decay": 0.1}

LAMB = OptimizerSpec(
    "LAMB",
    lamb,
    lr=1e-3,
    generic={
        "tensor betas": TENSOR_BETAS,
        "no bias correction": {"bias_correction": False, "trust_clip": True},
        "decoupled_decay": {"decoupled_decay": True, "always_adapt": True, "weight_decay": 0.0},
        "bounds": {"trust_bounds": (4.0, 6.0), "weight_decay": 0.1},
        "bounds, decoupled": {"trust_bounds": (0.0, 6.0), "weight_decay": 0.1, "decoupled_decay": True},
    },
    # Each backend adds up norms in an order of its own, but in fp64: a ratio rounded to fp32 would differ if its true
    # value were within some 1e-15 of the middle between two numbers. With these variants it never is, nor with LARS's.
    variants={
        "": DECAY,
        "decoupled, clipped": {
            "decoupled_decay": True,
            "trust_clip": True,
            "bias_correction": False,
            "maximize": True,
            "eps": 1e-3,
        },
    },
    of_timm={
        "": DECAY,
        "no decay": {"lr": 1e-3, "weight_decay": 0.0},
        "clipped": {"lr": 1e-2, "weight_decay": 0.01, "trust_clip": True},
        "no decay, adapted": {"lr": 1e-2, "weight_decay": 0.0, "always_adapt": True},
        "decoupled": {**DECAY, "decoupled_decay": True},
        "uncorrected": {**DECAY, "bias_correction": False},
    },
    timm="Lamb",
    timm_options={"max_grad_norm": None},
    refused=[
        *BAD_BOUNDS,
        *BAD_EPS,
        ({"caution": True}, "does not support caution=True"),
        ({"corrected_weight_decay": True}, "does not support corrected_weight_decay=True"),
        ({"grad_averaging": False}, "does not support grad_averaging=False; leave it True"),
    ],
    hashed={
        "no bias correction": {"bias_correction": False},
        "trust clip": {"trust_clip": True},
        "always adapt": {"always_adapt": True, "weight_decay": 0.0},
        "no decay": {"weight_decay": 0.0},
        "decoupled": {"decoupled_decay": True},
        "3 layers": {"layers": 3, **LAYERED},
        "rows": {"layers": "rows", **LAYERED, "layouts": ("6 layers",), "trust_clip": True},
    },
    everywhere=("lamb: power, fp32", "lamb norms: power, fp32", "lamb: prologue", "lamb: ratios"),
)
