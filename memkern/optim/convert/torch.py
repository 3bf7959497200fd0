"""Converts state dicts of torch.optim's Adam and AdamW to memkern's, and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .. import weights
from ..adam import Adam
from ..format import Format
from ..state import store_moment
from .states import (
    TORCH_ONLY,
    check_keys,
    check_moment,
    check_optimizer,
    export_entries,
    export_groups,
    floats_of,
    import_entries,
    import_groups,
    loadable,
    step_number,
)


@torch.no_grad()
def from_torch_state_dict(optimizer: Adam, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state of a torch.optim.AdamW or Adam as one that ``optimizer.load_state_dict`` takes.

    Args:
        optimizer: memkern's Adam, AdamW, Adam8bit or AdamW8bit over the same parameters in the same order;
            not changed. Its groups say how states are stored (state_bits, block_size, codec, min_8bit_size).
        state_dict: of torch.optim.AdamW or Adam, foreach, fused and capturable too: ``exp_avg`` and
            ``exp_avg_sq`` (with amsgrad ``max_exp_avg_sq``) of the parameter's shape in any floating-point dtype, and
            ``step``. Of torchao's Adam8bit, AdamW8bit, AdamW4bit and AdamWFp8 too, whose moments are read as floats.

    Returns:
        A state dict of new tensors. ``step`` is float32 on the CPU. Moments that the group stores in 8 bits
        become codes (``exp_avg`` int8, ``exp_avg_sq`` uint8, as the optimizer's state has them) and scales
        (float32), rounded as the optimizer would have rounded them at that step; the others are float32. lr,
        betas, eps, weight_decay, maximize, decoupled_weight_decay and what schedulers add come from
        ``state_dict``; foreach, fused, capturable and differentiable are left out. A parameter that has no
        state yet has none after.

    Raises:
        TypeError: ``optimizer`` is not memkern's Adam, or an entry of the state is not what torch.optim
            makes.
        ValueError: the state does not fit the parameters, has negative second moments or entries of another optimizer
            (NAdam's) or groups of one (RAdam's), or has amsgrad where the optimizer stores 8 bits.
    """
    check_optimizer(optimizer, Adam)
    entries = import_entries(optimizer, state_dict)
    groups = import_groups(optimizer, state_dict)
    for index, converted in enumerate(groups):
        if converted["amsgrad"] and Format.of(converted).has_codes:
            raise ValueError(
                f'state_dict["param_groups"][{index}] has amsgrad=True, which needs 32-bit states: '
                f"state_bits must be 32 in the optimizer's group, got {converted['state_bits']}"
            )
    group_of = {i: converted for converted in groups for i in converted["params"]}
    state = {}
    for i, p, group, values in entries:
        where = f'state_dict["state"][{i!r}]'
        state[i] = adam_state(where, values, p, group, optimizer._op_of(group_of[i]).moments)
    for index, saved in enumerate(state_dict["param_groups"]):
        if "amsgrad" not in saved:  # RAdam's group, whose states have Adam's entries
            raise ValueError(
                f'state_dict["param_groups"][{index}] must be of torch.optim.Adam or AdamW, whose groups have amsgrad, '
                f"got {', '.join(sorted(saved))}"
            )
    return loadable(state, groups)


def adam_state(
    where: str, values: dict[str, Any], p: Tensor, group: dict[str, Any], moments: Iterable[str]
) -> dict[str, Tensor]:
    """A parameter's state of torch's Adam or AdamW as a group of memkern's stores it. ``where``: it, for errors."""
    check_keys(where, values, [*moments, "step"])
    step = step_number(where, values["step"])
    state = {"step": torch.tensor(step, dtype=torch.float32, device="cpu")}
    for name in moments:
        x = values[name]
        check_moment(f"{where}[{name!r}]", x, p)
        state |= store_moment(name, x, p, group, int(step))
    if others := {*values} - {*moments, "max_exp_avg_sq", "step"}:
        raise ValueError(
            f"{where} must be of torch.optim.Adam or AdamW, which keep {', '.join(moments)} and step, got "
            f"{', '.join(sorted(map(str, others)))} too, as another optimizer keeps (NAdam: mu_product)"
        )
    return state | weights.initial_state(p, group)


@torch.no_grad()
def to_torch_state_dict(optimizer: Adam) -> dict[str, Any]:
    """The optimizer's state as one that torch.optim.AdamW or Adam over the same parameters takes.

    Args:
        optimizer: memkern's Adam, AdamW, Adam8bit or AdamW8bit. The result is for torch.optim.AdamW where its
            groups decay decoupled, else for torch.optim.Adam.

    Returns:
        A state dict of new tensors: ``exp_avg`` and ``exp_avg_sq`` float32 with the parameter's shape and
        strides (torch.optim rounds them to the parameter's dtype when it loads them), ``step`` float32 on the
        CPU. 32-bit states are exact, 8-bit ones the values of their codes. foreach, fused and capturable are
        torch's defaults.

    Raises:
        TypeError: ``optimizer`` is not memkern's Adam.
    """
    check_optimizer(optimizer, Adam)
    state = {
        i: {
            "step": values["step"].detach().to("cpu", copy=True),
            **floats_of(optimizer._op_of(group), values, p),
        }
        for i, p, group, values in export_entries(optimizer)
    }
    return {"state": state, "param_groups": export_groups(optimizer, TORCH_ONLY)}
