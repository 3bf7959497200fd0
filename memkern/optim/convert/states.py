"""Reads and makes the groups and the entries of state dicts for the converters, and checks them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...schemas import StepOp
from ..base import BlockwiseOptimizer
from ..checks import READ_AT_EACH_STEP, plain
from ..loading import block_order
from ..replaced import states_of
from ..state import State, load_moment, moment_dtype

# Options that stay those of memkern's groups, and are left out for torch's: other libraries have none of them but
# capturable, which the caller chooses.
OPTIONS = (
    *("state_bits", "block_size", "codec", "min_8bit_size", "max_grad_norm", "capturable"),
    *("master_weights", "stochastic_rounding"),
)
# Other libraries' options that are not converted, with their defaults.
TORCH_ONLY = {"foreach": None, "capturable": False, "differentiable": False, "fused": None}
BNB_ONLY = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}  # AdEMAMix's, in each group of bitsandbytes

Entry = tuple[Any, Tensor, dict[str, Any], Any]  # key in the state dict, parameter, memkern's group, state


# ---- groups and entries


def import_groups(optimizer: BlockwiseOptimizer, state_dict: dict[str, Any], **fixed: Any) -> list[dict[str, Any]]:
    """The groups of another library's state dict, completed by memkern's options of the optimizer's groups."""
    groups = []
    wanted = {"lr", "betas", "eps", "weight_decay"} & {*optimizer.defaults}
    left_out = {*OPTIONS, *TORCH_ONLY, *BNB_ONLY, *({"eps"} - wanted)}
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, state_dict["param_groups"], strict=True)):
        check_keys(f'state_dict["param_groups"][{number}]', saved, sorted(wanted))
        groups.append(
            {
                **{key: group[key] for key in optimizer.defaults if key in group},
                **{key: value for key, value in saved.items() if key not in left_out},
                "betas": tuple(float(b) for b in saved["betas"]),  # which may be tensors
                "params": list(saved["params"]),
                **fixed,
            }
        )
    return groups


def export_groups(optimizer: BlockwiseOptimizer, added: dict[str, Any]) -> list[dict[str, Any]]:
    """The optimizer's groups without memkern's options but with ``added``; parameters have state_dict()'s numbers."""
    groups, first = [], 0
    for group in optimizer.param_groups:
        kept = {key: value for key, value in group.items() if key not in (*OPTIONS, "params")}
        kept |= {key: plain(kept[key]) for key in READ_AT_EACH_STEP[1:] if key in kept}  # lr stays a tensor
        count = len(group["params"])
        groups.append({**kept, **added, "params": list(range(first, first + count))})
        first += count
    return groups


def export_entries(optimizer: BlockwiseOptimizer) -> Iterator[Entry]:
    """Every parameter that has a state in the optimizer; its key is its number in state_dict()."""
    states = states_of(optimizer)
    pairs = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    for i, (p, group) in enumerate(pairs):
        if p in states:
            yield i, p, group, states[p]


def import_entries(optimizer: BlockwiseOptimizer, state_dict: dict[str, Any]) -> list[Entry]:
    """Every parameter that another library's state dict has an entry for."""
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= {*state_dict}:
        got = list(state_dict) if isinstance(state_dict, dict) else type(state_dict).__name__
        raise TypeError(f"state_dict must be an optimizer's, with state and param_groups, got {got}")
    groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
    sizes, saved_sizes = ([len(group["params"]) for group in x] for x in (groups, saved_groups))
    if sizes != saved_sizes:
        raise ValueError(f"state_dict must have groups of {sizes} parameters, as optimizer, got {saved_sizes}")
    pairs = zip(groups, saved_groups, strict=True)
    owners = [(i, p, group) for group, saved in pairs for i, p in zip(saved["params"], group["params"], strict=True)]
    if extra := {*state_dict["state"]} - {i for i, _, _ in owners}:
        raise ValueError(f'state_dict["state"] has entries of no parameter: {sorted(extra, key=str)}')
    return [(i, p, group, state_dict["state"][i]) for i, p, group in owners if state_dict["state"].get(i)]


def loadable(state: dict[Any, dict[str, Tensor]], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The state dict of these states, by parameter numbers, and groups."""
    return {"state": {i: {**entries, **block_order(entries)} for i, entries in state.items()}, "param_groups": groups}


def floats_of(op: StepOp, values: State, p: Tensor) -> dict[str, Tensor]:
    """The moments of a state as floats; zeros for one that an option (amsgrad) has added since the last step."""
    return {
        name: load_moment(name, values) if name in values else torch.zeros_like(p, dtype=moment_dtype(p))
        for name in op.moments
    }


# ---- checks


def check_optimizer(optimizer: Any, *kinds: type) -> None:
    if not isinstance(optimizer, kinds):
        names = " or ".join(f"memkern.optim.{kind.__name__}" for kind in kinds)
        got = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        inner = "; HostOffload's is optimizer.inner" if hasattr(optimizer, "inner") else ""
        raise TypeError(f"optimizer must be a {names}, got {got}{inner}")


def check_keys(where: str, values: dict[str, Any], keys: list[str]) -> None:
    if missing := [key for key in keys if key not in values]:
        raise ValueError(f"{where} must have {', '.join(missing)}, got only {', '.join(map(str, values))}")


def check_moment(where: str, x: Any, p: Tensor, or_uint8: bool = False) -> None:
    if not isinstance(x, Tensor) or not (x.is_floating_point() or (or_uint8 and x.dtype == torch.uint8)):
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        wanted = "floating-point or uint8" if or_uint8 else "floating-point"
        raise TypeError(f"{where} must be a {wanted} tensor, got {got}")
    if x.shape != p.shape:
        raise ValueError(f"{where} must have its parameter's shape {tuple(p.shape)}, got {tuple(x.shape)}")


def step_number(where: str, step: Any) -> float:
    number = float(step) if not isinstance(step, Tensor) or step.numel() == 1 else -1.0  # which is refused
    if not number >= 0 or number % 1 != 0:
        raise ValueError(f"{where}['step'] must be one whole number, 0 or more, got {step}")
    return number
