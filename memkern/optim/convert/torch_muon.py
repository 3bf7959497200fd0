"""Converts the state dicts of a torch.optim.Muon and of the AdamW for its other parameters to one of memkern's Muon."""

from __future__ import annotations

from typing import Any

import torch

from .. import weights
from ..muon import Muon
from ..state import store_moment
from .states import (
    OPTIONS,
    TORCH_ONLY,
    check_keys,
    check_moment,
    check_optimizer,
    loadable,
)
from .torch import adam_state

_MUON_OPTIONS = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
"""The options of torch.optim.Muon's groups."""
# The options that torch.optim.AdamW's groups must have.
_ADAMW_OPTIONS = ("lr", "betas", "eps", "weight_decay", "maximize")


@torch.no_grad()
def from_torch_muon_state_dict(
    optimizer: Muon, state_dict: dict[str, Any], adamw: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The states of a torch.optim.Muon and a torch.optim.AdamW as one that ``optimizer.load_state_dict`` takes.

    Args:
        optimizer: memkern's Muon or Muon8bit; not changed. Its groups say how states are stored.
        state_dict: of torch.optim.Muon, over the parameters of the optimizer's groups with algorithm="muon", in the
            same groups and order.
        adamw: of torch.optim.AdamW, likewise of the groups with algorithm="adamw". None: these begin without a state.

    Returns:
        A state dict of new tensors. ``momentum_buffer`` becomes codes and scales where the group stores 8 bits, and is
        float32 elsewhere. torch's Muon counts no steps: ``step``, which codes are dithered by, begins at 0. Options
        come from the given groups.

    Raises:
        TypeError: ``optimizer`` is not memkern's Muon, or an entry is not what torch.optim makes.
        ValueError: groups or states do not fit the parameters.
    """
    check_optimizer(optimizer, Muon)
    sources = {"muon": state_dict, "adamw": adamw}
    groups, state = [], {}
    group_counts, first = {"muon": 0, "adamw": 0}, 0  # so far; the number of the next parameter
    for group in optimizer.param_groups:
        algorithm = group["algorithm"]
        name = "state_dict" if algorithm == "muon" else "adamw"  # of the argument, for errors
        numbers = list(range(first, first + len(group["params"])))
        first += len(numbers)
        source, index = sources[algorithm], group_counts[algorithm]
        group_counts[algorithm] += 1
        if source is None:
            groups.append({**group, "params": numbers})
            continue
        saved = _group_at(name, source, index, len(numbers))
        wanted = _MUON_OPTIONS if algorithm == "muon" else _ADAMW_OPTIONS
        check_keys(f'{name}["param_groups"][{index}]', saved, list(wanted))
        kept = {key: value for key, value in saved.items() if key not in (*OPTIONS, *TORCH_ONLY, "amsgrad")}
        groups.append({**group, **kept, "params": numbers})
        for i, p, number in zip(numbers, group["params"], saved["params"], strict=True):
            if not (values := source["state"].get(number)):
                continue
            where = f'{name}["state"][{number!r}]'
            if algorithm == "adamw":
                state[i] = adam_state(where, values, p, group, ("exp_avg", "exp_avg_sq"))
                continue
            check_keys(where, values, ["momentum_buffer"])
            x = values["momentum_buffer"]
            check_moment(f"{where}['momentum_buffer']", x, p)
            state[i] = {
                **store_moment("momentum_buffer", x, p, group, 0),
                "step": torch.zeros((), dtype=torch.float32, device="cpu"),
                **weights.initial_state(p, group),
            }
    for algorithm, name in (("muon", "state_dict"), ("adamw", "adamw")):
        source = sources[algorithm]
        if source is not None and len(source["param_groups"]) != group_counts[algorithm]:
            raise ValueError(
                f"{name} must have {group_counts[algorithm]} groups, as optimizer with algorithm={algorithm!r}, "
                f"got {len(source['param_groups'])}"
            )
    return loadable(state, groups)


def _group_at(name: str, source: Any, index: int, count: int) -> dict[str, Any]:
    """The group at an index in a given state dict; raises unless it has ``count`` parameters."""
    if not isinstance(source, dict) or not {"state", "param_groups"} <= {*source}:
        got = list(source) if isinstance(source, dict) else type(source).__name__
        raise TypeError(f"{name} must be an optimizer's, with state and param_groups, got {got}")
    sizes = [len(group["params"]) for group in source["param_groups"]]
    if index >= len(sizes) or sizes[index] != count:
        raise ValueError(f"{name} must have {count} parameters in group {index}, as optimizer, got groups of {sizes}")
    return source["param_groups"][index]
