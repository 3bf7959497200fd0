"""Joins a bf16 model and its optimizer's rounding errors to fp32 weights, and splits fp32 weights into both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...quant.codec import WEIGHT_DROPPED_BITS
from ...reference.weights import split_weight
from ..base import BlockwiseOptimizer
from ..dtensor.shards import local, placed
from ..offload.host import HostOffload
from ..replaced import states_of
from ..weights import KEYS, fp32_weight


def _check_model(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, (BlockwiseOptimizer, HostOffload)):
        got = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        raise TypeError(f"optimizer must be one of memkern.optim's, got {got}")
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    if stepped and not any(p in stepped for p in model.parameters()):
        raise ValueError(
            "optimizer must step parameters of model, and none of its is one: is model a copy, or optimizer the inner "
            "one of a HostOffload? Give the model that is trained and the optimizer that was made of its parameters"
        )


@torch.no_grad()
def to_fp32_state_dict(model: nn.Module, optimizer: BlockwiseOptimizer | HostOffload) -> dict[str, Tensor]:
    """``model.state_dict()`` with its bf16 parameters in fp32, joined with the errors that the optimizer keeps.

    Args:
        model: whose parameters the optimizer steps; not changed.
        optimizer: with ``master_weights`` "bf16+16" the result is exact, with "bf16+8" it has 24 bits. A parameter that
            keeps no error (another group, no step yet) has its bf16 value, and so has an element that is 0; an error
            is added to edited weights, too. For HostOffload: the host's weights, also of an fp16 model.

    Returns:
        A state dict of the model's: new float32 tensors for bf16 parameters; the others and buffers as they are.

    Raises:
        TypeError: another kind of model or optimizer.
        ValueError: the optimizer steps no parameter of the model, as where the model is a copy.
    """
    _check_model(model, optimizer)
    if isinstance(optimizer, HostOffload):
        optimizer._follow_edits(converts=False)  # changed options may change back before the next step
    state_dict = model.state_dict()
    states = states_of(optimizer) if isinstance(optimizer, BlockwiseOptimizer) else optimizer.state
    for name, p in model.named_parameters(remove_duplicate=False):
        if name not in state_dict:
            continue
        host = optimizer._host_weight(p) if isinstance(optimizer, HostOffload) else None
        if host is not None:
            x = host.to(p.device, torch.float32)
            state_dict[name] = torch.where(x.to(p.dtype) == p, x, p.detach().float())
        elif p.dtype == torch.bfloat16:
            errors = {key: x for key, x in states.get(p, {}).items() if key in KEYS}
            state_dict[name] = x = fp32_weight(p, errors)
            weight = local(p.detach())  # an element that is 0 stays so: its error is at most 4.6e-41
            local(x).copy_(torch.where(weight == 0, weight.float(), local(x)))
    return state_dict


@torch.no_grad()
def load_fp32_state_dict(model: nn.Module, optimizer: BlockwiseOptimizer, state_dict: dict[str, Tensor]) -> None:
    """Loads fp32 weights into a bf16 model and its optimizer: the inverse of :func:`to_fp32_state_dict`.

    Args:
        model: gets ``state_dict``; its bf16 parameters are rounded to the nearest.
        optimizer: parameters in groups with ``master_weights`` get their errors, exact but with "bf16+8", whose 24
            bits are rounded to the nearest. One that has not stepped yet gets a state of zeros.
        state_dict: for ``model.load_state_dict``, all keys.

    Raises:
        TypeError: another kind of model or optimizer. HostOffload: load into the model and the optimizer's class, and
            give its state_dict() to a new HostOffload.
        ValueError: the optimizer steps no parameter of the model.
        RuntimeError: what ``model.load_state_dict`` raises; nothing of the optimizer is changed then.
    """
    _check_model(model, optimizer)
    if hasattr(optimizer, "inner"):
        raise TypeError(
            "optimizer must not be HostOffload: load into the model and an optimizer of its class, and give that one's "
            "state_dict() to HostOffload.load_state_dict"
        )
    optimizer._follow_groups()  # as the next step would: states of replaced parameters, and of other options
    model.load_state_dict(state_dict)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters(remove_duplicate=False):
        group = groups.get(p)
        if group is None or group["master_weights"] is None or name not in state_dict:
            continue
        x = state_dict[name].to(p.device, torch.float32)
        if not optimizer.state.get(p):
            optimizer.state[p] = optimizer._init_state(p, group)
        dropped = WEIGHT_DROPPED_BITS[group["master_weights"]]
        x = placed("weight_error", x, p, group["block_size"])
        weight, error = split_weight(local(x), 1 << dropped >> 1, dropped)  # half a unit: round to the nearest
        local(p).copy_(weight)
        local(optimizer.state[p]["weight_error"]).copy_(error)
