"""Loading a state dict: what is refused, and what an optimizer of other options stored."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ..quant.layout import layout_of, same_layout
from ..schemas import StepOp
from . import bits, weights
from .sharding import is_dtensor, is_flat_shard, local, placed
from .storage import ENTRIES, dense_like, moment_dtype, own_entries, restored, takes_8bit_state

if TYPE_CHECKING:
    from .base import BlockwiseOptimizer

Group = dict[str, Any]
OWN_OPTIONS = ("state_bits", "master_weights", "stochastic_rounding")
"""Options that a loaded state does not change: its tensors are converted."""


class Held:
    """A tensor that torch's load_state_dict does not see: it would cast it to the parameter's dtype."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def for_parameter(self, p: Tensor) -> Tensor:
        """A copy on the parameter's device, with its strides where it has its shape."""
        tensor = self.tensor.detach()
        if is_dtensor(tensor):
            return tensor.clone()
        like = p if tensor.shape == p.shape else tensor
        fresh = torch.empty_like(like, dtype=tensor.dtype, device=p.device)
        return fresh.requires_grad_(False).copy_(tensor)


def prepared(optimizer: BlockwiseOptimizer, state_dict: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The state dict as the optimizer takes it, its tensors held, and what its groups' options were changed from.

    The optimizer's own class, ``state_bits``, ``max_grad_norm`` and ``capturable`` win; a state in other bits is
    converted. The other options come with the state.

    Raises:
        ValueError: the state is not memkern's, or does not fit the parameters.
    """
    groups, saved = optimizer.param_groups, state_dict["param_groups"]
    if [len(g["params"]) for g in groups] != [len(s["params"]) for s in saved]:
        return state_dict, []  # torch has a message for this
    changes: list[str] = []
    older, newer = [], []
    for k, (own, given) in enumerate(zip(groups, saved, strict=True)):
        _check_options(optimizer, k, given)
        older.append({**given, "state_bits": bits.of(given)})
        optimizer._check_group({**older[k], "params": own["params"]})
        fixed = {key: own[key] for key in OWN_OPTIONS} | optimizer.fixed_options
        if bits.has_4bit_codes(fixed):
            fixed["codec"] = "power"  # the only one with 4 bits
        if differing := [f"{key} {older[k][key]} -> {x}" for key, x in fixed.items() if older[k][key] != x]:
            changes.append(f"group {k}: {', '.join(differing)}")
        whole = {"max_grad_norm": optimizer.defaults["max_grad_norm"], "capturable": own["capturable"]}
        newer.append({**older[k], **fixed, **whole})
        optimizer._check_group({**newer[k], "params": own["params"]})
    of_index = {
        i: (p, older[k], newer[k])
        for k, own in enumerate(groups)
        for p, i in zip(own["params"], older[k]["params"], strict=True)
    }
    state = {
        i: {
            key: Held(value) if isinstance(value, Tensor) else value
            for key, value in _state(optimizer, i, values, *of_index[i]).items()
        }
        if i in of_index and values != {}
        else values
        for i, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state, "param_groups": newer}, changes


def _check_options(optimizer: BlockwiseOptimizer, k: int, saved: Group) -> None:
    """Raises ValueError for a saved group that lacks options of the optimizer."""
    own = {*optimizer.defaults} - {"differentiable"}  # torch's __setstate__ adds that one
    if missing := own - {*saved}:
        names = [f"memkern.optim.{name}" for name in optimizer.converters]
        way = (
            f"{' and '.join(names)} convert{'' if len(names) > 1 else 's'} others"
            if names
            else "no converter to it exists: load the model's weights, and begin with a new state"
        )
        raise ValueError(
            f"the state_dict is not one of memkern's {type(optimizer).__name__}: its group {k} has no "
            f"{', '.join(sorted(missing))}; {way}"
        )


def _state(
    optimizer: BlockwiseOptimizer, i: Any, state: Any, p: Tensor, older: Group, newer: Group
) -> dict[str, Tensor]:
    """A parameter's state, checked, and stored as the optimizer's group asks for."""
    if not isinstance(state, dict):
        does_not_fit(optimizer, i, f"it must be a dict of tensors, got {state!r}")
    op = optimizer._op_of(older)
    if isinstance(step := state.get("step"), (int, float)):  # as torch.optim once had it
        state = {**state, "step": torch.tensor(float(step), dtype=torch.float32, device="cpu")}
    elif isinstance(step, Tensor) and step.numel() == 1 and not step.is_complex():
        state = {**state, "step": step.float()}
    state = {
        key: placed(key, x, p, older["block_size"], _is_packed(op, key, x, older))
        if isinstance(x, Tensor) and key in ENTRIES
        else x
        for key, x in state.items()
    }
    optimizer._check_state(i, state, p, older)
    in_other_bits = any(older[key] != newer[key] for key in OWN_OPTIONS)
    first = state[next(iter(op.moments))]
    in_other_dtype = first.is_floating_point() and first.dtype != moment_dtype(p)
    if in_other_bits or in_other_dtype or is_flat_shard(p):
        state = restored(optimizer._op_of(newer), state, p, newer, older) or state
    return state


def _is_packed(op: StepOp, key: str, x: Tensor, group: Group) -> bool:
    """Whether an entry of a state has codes of 4 bits."""
    return bits.has_4bit_codes(group) and op.moments.get(key) is False and x.dtype == torch.uint8


def does_not_fit(optimizer: BlockwiseOptimizer, i: Any, what: str) -> NoReturn:
    raise ValueError(f"the state of parameter {i} does not fit {type(optimizer).__name__}: {what}")


def check_state(
    optimizer: BlockwiseOptimizer, i: Any, state: dict[str, Any], p: Tensor, group: Group
) -> None:
    """Raises ValueError unless these are the entries that the group's options ask for."""
    op = optimizer._op_of(group)
    first = state.get(next(iter(op.moments)))
    coded = isinstance(first, Tensor) and not first.is_floating_point()
    keys = [k for k in optimizer._state_keys(op) if coded or not k.endswith("_scale")]
    keys += weights.keys_of(group)
    if {*own_entries(state)} != {*keys}:
        does_not_fit(optimizer, i, f"keys {sorted(state)}, expected {sorted(keys)}")
    for key in keys:
        value = state[key]
        if not isinstance(value, Tensor):
            does_not_fit(optimizer, i, f"{key} must be a tensor, got {type(value).__name__}")
        if key == "step":
            if value.numel() != 1 or value.dtype != torch.float32:
                does_not_fit(optimizer, i, f"step must be one float32 number, got {value}")
            if _has_values(value) and not 0 <= float(value) < math.inf:
                does_not_fit(optimizer, i, f"step must be one finite number, 0 or more, got {value}")
        elif key.endswith("_scale"):
            _check_scale(optimizer, i, key, value, layout_of(dense_like(p), group["block_size"]).scale_shape)
        elif key in weights.KEYS:
            dtype = weights.MASTER_WEIGHTS[group["master_weights"]][key]
            if value.dtype != dtype or value.shape != p.shape:
                does_not_fit(
                    optimizer,
                    i,
                    f"{key} must be {dtype} of shape {tuple(p.shape)}, got {value.dtype} of shape {tuple(value.shape)}",
                )
        elif coded and _is_packed(op, key, value, group):
            shape = layout_of(dense_like(p), group["block_size"]).packed_shape
            if tuple(value.shape) != shape:
                does_not_fit(
                    optimizer,
                    i,
                    f"{key} must have the shape {shape} for codes of 4 bits, got {tuple(value.shape)}",
                )
        elif key in op.moments:
            _check_moment(optimizer, i, key, value, p, coded, op.moments[key])
    # SGD and Lion may have such numbers of their own; Adam's m and v cannot both.
    may_be_codes = not coded and (len(op.moments) > 1 or takes_8bit_state(p, group))
    if may_be_codes and all(_are_codes(local(state[key]), signed) for key, signed in op.moments.items()):
        # torch.distributed.checkpoint.load writes into the tensors of this optimizer's state, whatever was saved.
        does_not_fit(
            optimizer,
            i,
            f"{', '.join(op.moments)}: codes of an 8-bit state as floats; torch.distributed.checkpoint loads into a "
            "state of the state_bits that were saved: give the optimizer state_bits=8, load, and change that of its "
            "groups then",
        )


def _check_scale(optimizer: BlockwiseOptimizer, i: Any, key: str, scale: Tensor, shape: Any) -> None:
    if scale.dtype != torch.float32 or tuple(scale.shape) != shape:
        does_not_fit(
            optimizer,
            i,
            f"{key} must be float32 of shape {shape}, got {scale.dtype} of shape {tuple(scale.shape)}",
        )
    if _has_values(scale) and not bool(((local(scale) >= 0) & local(scale).isfinite()).all()):
        does_not_fit(optimizer, i, f"{key} has entries that are negative or not finite")


def _has_values(x: Tensor) -> bool:
    """False on meta and under FakeTensorMode."""
    return not x.is_meta and type(x).__name__ != "FakeTensor"


def _are_codes(x: Tensor, signed: bool) -> bool:
    """Whether floats are whole numbers up to the largest code, which each block has whose scale is not zero."""
    return (
        x.numel() > 1
        and _has_values(x)
        and bool((x == x.trunc()).all())
        and float(x.abs().max()) in ((127, 128) if signed else (255,))
    )


def _check_moment(
    optimizer: BlockwiseOptimizer, i: Any, key: str, value: Tensor, p: Tensor, coded: bool, signed: bool
) -> None:
    allowed = (optimizer.moments[key],) if coded else (torch.float32, torch.float64)
    if value.dtype not in allowed or value.shape != p.shape:
        does_not_fit(
            optimizer,
            i,
            f"{key} must be {allowed[0]} of shape {tuple(p.shape)}, got {value.dtype} of shape {tuple(value.shape)}",
        )
    like = dense_like(p)
    if coded and not same_layout(value, like):
        # Another memory format cuts other blocks. The codes' own strides may have been lost on the way here, so that
        # only one who knows the parameter they are from can convert them.
        does_not_fit(
            optimizer,
            i,
            f"{key} must have strides {like.stride()} like its parameter, got {value.stride()}; load the state while "
            "the model has the memory format that it was saved in, and change that after: the next step converts it",
        )
    if not coded and not signed and _has_values(value) and bool((local(value) < 0).any()):
        does_not_fit(optimizer, i, f"{key}, a second moment, has negative entries")
