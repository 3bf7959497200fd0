"""A parameter's state: its entries, how moments are stored (codes or floats), and the conversion between the ways."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _ops
from ..quant.blockwise import dequantize_blockwise
from ..quant.layout import EVERY_ROW, is_dense, layer_count, same_layout
from ..reference.blockwise import dequantize_packed, quantize_packed, sqrt
from ..schemas import AMSGRAD_STEP, STEP_OPS, StepOp
from . import bits, weights
from .dtensor import blocks, shards

# 1-D tensors stay fp32 up to this many times min_8bit_size: biases and norms are small and matter, while the flat
# shards that data-parallel wrappers make are far larger.
MIN_1D_FACTOR = 16
SIGNED = {name: signed for op in STEP_OPS.values() for name, signed in op.moments.items()}
"""Whether a moment's codes have a sign."""
ENTRIES = {
    *(*SIGNED, *AMSGRAD_STEP.moments),
    *(f"{name}_scale" for name in SIGNED),
    *("step", "trust_ratio", *weights.KEYS),
}
"""memkern's own entries of a state. Wrappers may add others (timm's Lookahead), which stay as they are."""


def own_entries(state: dict[str, Any]) -> dict[str, Any]:
    return state if ENTRIES.issuperset(state) else {key: x for key, x in state.items() if key in ENTRIES}


def takes_8bit_state(p: Tensor, group: dict[str, Any]) -> bool:
    """Whether a parameter's moments are stored in 8 bits: the group asks for it and the tensor is large enough."""
    least = group["min_8bit_size"] * (MIN_1D_FACTOR if p.dim() <= 1 else 1)
    return bits.are_codes(group) and p.numel() >= least


def moment_dtype(p: Tensor) -> torch.dtype:
    """The dtype of moments that are not codes."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def dense_like(p: Tensor) -> Tensor:
    """A tensor with the strides that a parameter's state has: the parameter, or one on meta where it is not dense."""
    return p if is_dense(p.shape, p.stride()) else torch.empty_like(p, device="meta")


# ---- entries


def state_keys(op: StepOp) -> list[str]:
    """The entries that an op's step takes, without those of ``master_weights``."""
    scales = [f"{name}_scale" for name in op.moments]
    return [*op.moments, *scales, "step", *(["trust_ratio"] if op.has_trust_ratios else [])]


def layers_number(group: dict[str, Any]) -> int:
    """The group's ``layers`` as the ops take it."""
    return EVERY_ROW if group["layers"] == "rows" else group["layers"]


def layers_of(p: Tensor, group: dict[str, Any]) -> int:
    """How many layers a parameter is, each of which has a trust ratio of its own."""
    return layer_count(dense_like(p), group["block_size"], layers_number(group))


def _ones(p: Tensor, group: dict[str, Any]) -> Tensor:
    """Trust ratios of a parameter that has not stepped yet."""
    return torch.ones(layers_of(p, group), dtype=moment_dtype(p), device=p.device)


@torch.inference_mode(False)  # tensors that were made inside could not be written outside
def initial_state(op: StepOp, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """The state before the first step: moments of zero, without scales where they are floats."""
    state: dict[str, Tensor] = {}
    coded = takes_8bit_state(p, group)
    for name, signed in op.moments.items():
        dtype = (torch.int8 if signed else torch.uint8) if coded else moment_dtype(p)
        if dtype == torch.uint8 and bits.has_4bit_codes(group):
            state[name] = shards.new_packed(p, dense_like(p), group["block_size"])
        else:
            state[name] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
    if coded:
        for name in op.moments:
            state[f"{name}_scale"] = shards.new_scale(p, dense_like(p), group["block_size"])
    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
    state |= weights.initial_state(p, group)
    return state | {"trust_ratio": _ones(p, group)} if op.has_trust_ratios else state


# ---- moments


def store_moment(
    name: str, x: Tensor, p: Tensor, group: dict[str, Any], step: int, coded: bool | None = None
) -> dict[str, Tensor]:
    """A moment, given as floats of the parameter's shape, as the optimizer keeps it.

    ``coded``: in 8 bits; by default where the group stores such a parameter so.
    """
    coded = takes_8bit_state(p, group) if coded is None else coded
    x = torch.empty_like(p, dtype=moment_dtype(p), requires_grad=False).copy_(x)
    if name == "exp_avg_sq" and bool((shards.local(x) < 0).any()):
        raise ValueError(f"the second moment of a parameter of shape {tuple(p.shape)} has negative entries")
    if not coded:
        return {name: x}
    codec, signed, block_size = group["codec"], SIGNED[name], group["block_size"]
    rooted = codec == "power" and not signed
    if rooted and bits.has_4bit_codes(group):
        pack = blocks.quantize_packed if shards.is_dtensor(p) else quantize_packed
        codes, scale = pack(sqrt(x), block_size, step)
        return {name: codes, f"{name}_scale": scale}
    quantize = blocks.quantize if shards.is_dtensor(p) else _ops.quantize_blockwise
    codes, scale = quantize(sqrt(x) if rooted else x, codec, signed, block_size, step)
    return {name: codes, f"{name}_scale": scale}


def load_moment(name: str, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
    """A moment of memkern's as new float values with its own strides."""
    codes, codec = state[name], group["codec"]
    if codes.is_floating_point():
        return codes.clone()
    scale, block_size = state[f"{name}_scale"], group["block_size"]
    if bits.has_4bit_codes(group) and codes.dtype == torch.uint8:
        unpack = blocks.dequantize_packed if shards.is_dtensor(codes) else dequantize_packed
        w = unpack(codes, scale, state["exp_avg"], block_size)  # which lies in memory as the parameter did
        return w * w
    if shards.is_dtensor(codes):
        x = blocks.dequantize(codes, scale, codec, block_size)
    else:
        x = dequantize_blockwise(codes, scale, codec=codec, block_size=block_size)
    return x * x if codec == "power" and codes.dtype == torch.uint8 else x


# ---- conversion


def convert_storage(
    op: StepOp, state: dict[str, Tensor], p: Tensor, group: dict[str, Any], before: dict[str, Any]
) -> dict[str, Tensor] | None:
    """The state as its parameter and its group now ask for it, or None where it is stored so already.

    Codes are read with the options of ``before`` and in their own memory format. A state of codes stays so while the
    group's ``state_bits`` are not 32, whatever the parameter's size: shards are smaller than the tensor they were cut
    from.
    """
    new = _converted(op, state, p, group, before)
    if op.has_trust_ratios and len(state["trust_ratio"]) != layers_of(p, group):
        return {**(new or state), "trust_ratio": _ones(p, group)}
    return new


def _converted(
    op: StepOp, state: dict[str, Tensor], p: Tensor, group: dict[str, Any], before: dict[str, Any]
) -> dict[str, Tensor] | None:
    """As :func:`convert_storage`, with the trust ratios that there are."""
    given = state
    state = own_entries(state)
    was_coded = any(key.endswith("_scale") for key in state)
    coded = bits.are_codes(group) and (was_coded or takes_8bit_state(p, group))
    like = dense_like(p)
    stored = [name for name in op.moments if name in state]  # amsgrad may have come or gone
    if was_coded and bits.has_4bit_codes(before):
        stored.remove("exp_avg_sq")  # its codes have a shape of their own, and the blocks of the others
    if any(state[name].shape != p.shape for name in stored):
        return None  # the op has a message for this
    same_place = all(same_layout(state[name], like) for name in stored)
    if coded:
        same_form = was_coded and all(before[key] == group[key] for key in ("block_size", "codec"))
        same_form = same_form and bits.of(before) == bits.of(group)
    else:
        same_form = all(state[name].dtype == moment_dtype(p) for name in stored)
    others = {"step", "trust_ratio", *(f"{name}_scale" for name in op.moments), *weights.KEYS}
    weight = weights.convert_storage(p, state, group)
    same_weight = [*weight] == [key for key in weights.KEYS if key in state] and all(
        x is state[key] for key, x in weight.items()
    )
    same_moments = same_place and same_form and {*state} - others == {*op.moments}
    if same_moments and same_weight:
        return None
    others_own = {key: x for key, x in given.items() if key not in state}
    if same_moments:
        return {key: x for key, x in state.items() if key not in weights.KEYS} | weight | others_own
    step = int(state["step"]) if "step" in state else 0
    new: dict[str, Tensor] = {}
    for name in op.moments:
        x = load_moment(name, state, before) if name in state else torch.zeros_like(p, dtype=moment_dtype(p))
        new |= store_moment(name, x, p, group, step, coded)
    rest = {key: x for key, x in state.items() if key in ("step", "trust_ratio")}
    if "trust_ratio" in rest:
        rest["trust_ratio"] = rest["trust_ratio"].to(moment_dtype(p))
    moments = {key: new[key] for key in sorted(new, key=lambda k: k.endswith("_scale"))}
    return {**moments, **rest, **weight, **others_own}
