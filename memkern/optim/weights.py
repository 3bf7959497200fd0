"""Stores bf16 parameters as the options ``master_weights`` and ``stochastic_rounding`` say, with their errors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..quant.codec import WEIGHT_DROPPED_BITS, WEIGHTS
from ..reference.weights import bits_of, join_weight
from .dtensor.shards import local

Group = dict[str, Any]  # a parameter group of an optimizer

MASTER_WEIGHTS = {
    None: {},
    "bf16+16": {"weight_error": torch.int16},
    "bf16+8": {"weight_error": torch.int8},
}
"""Values of ``master_weights``, and the entry that each adds to a parameter's state."""
KEYS = ("weight_error",)
"""All entries that ``master_weights`` may add to a state."""


def check_options(group: Group) -> None:
    """Raises ValueError for values of the two options that are not allowed, and where both are set."""
    master, stochastic = group["master_weights"], group["stochastic_rounding"]
    if master not in [*MASTER_WEIGHTS]:
        raise ValueError(f"master_weights must be one of {', '.join(map(repr, MASTER_WEIGHTS))}, got {master!r}")
    if not isinstance(stochastic, bool):
        raise ValueError(f"stochastic_rounding must be True or False, got {stochastic!r}")
    if stochastic and master is not None:
        raise ValueError(
            f"stochastic_rounding=True is for weights whose rounding error is not kept, got master_weights={master!r}; "
            "leave one of them out"
        )


def check_param(p: Tensor, group: Group) -> None:
    """Raises TypeError for a parameter that is not bf16 where its group sets one of the two options."""
    for name in ("master_weights", "stochastic_rounding"):
        if group[name] and p.dtype != torch.bfloat16:
            raise TypeError(
                f"{name}={group[name]!r} is for bfloat16 parameters, got {p.dtype} of shape {tuple(p.shape)}: it "
                "stores what rounding to bfloat16 loses; put other parameters into a group without it"
            )


def storage_of(group: Group) -> int:
    """The group's ``weight_storage`` as the number that ops take."""
    return WEIGHTS[group["master_weights"] or ("stochastic" if group["stochastic_rounding"] else "nearest")]


def initial_state(p: Tensor, group: Group) -> dict[str, Tensor]:
    """The entries before the first step: an error of zero."""
    return {
        key: torch.zeros_like(p, dtype=dtype, requires_grad=False)
        for key, dtype in MASTER_WEIGHTS[group["master_weights"]].items()
    }


def fp32_weight(p: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The weights that a step reads: a parameter joined with its state's error, as new fp32 values."""
    p = p.detach()
    result, own = torch.empty_like(p, dtype=torch.float32), local(p)
    if (error := state.get("weight_error")) is not None:
        dropped = WEIGHT_DROPPED_BITS["bf16+8" if error.dtype == torch.int8 else "bf16+16"]
        x = join_weight(own, local(error).to(own.device), dropped)
    else:
        x = own
    local(result).copy_(x)
    return result


def state_from_fp32(p: Tensor, x: Tensor, group: Group) -> dict[str, Tensor]:
    """The entries that ``master_weights`` keeps for fp32 weights ``x``, which round to ``p``: the error of rounding.

    In 8 bits the error is rounded to the nearest, to at most 127 units.
    """
    state = initial_state(p, group)
    p, x = local(p.detach()).float(), local(x).float()
    if "weight_error" in state:
        dropped = WEIGHT_DROPPED_BITS[group["master_weights"]]
        error = bits_of(x) - bits_of(p)
        half = (1 << dropped) >> 1  # is added so that the shift rounds to the nearest
        error = ((error + half) >> dropped).clamp(max=(2**15 >> dropped) - 1)
        local(state["weight_error"]).copy_(torch.where(p.isfinite(), error, 0))
    return state


def convert_storage(p: Tensor, state: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
    """The entries as the group asks for them; the state's own tensors if they are so already."""
    wanted = MASTER_WEIGHTS[group["master_weights"]]
    own = {key: state[key] for key in KEYS if key in state}
    if {key: x.dtype for key, x in own.items()} == wanted and all(x.shape == p.shape for x in own.values()):
        like = {key: torch.empty_like(p, dtype=x.dtype, requires_grad=False) for key, x in own.items()}
        if all(x.stride() == like[key].stride() for key, x in own.items()):
            return own
        return {key: like[key].copy_(x) for key, x in own.items()}
    return state_from_fp32(p, fp32_weight(p, state), group)
