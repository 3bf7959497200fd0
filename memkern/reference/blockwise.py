"""Block-wise 8-bit codes: the formulas of ``memkern.quant.codec`` on tensors of shape (blocks, block)."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ..quant import codec as C
from ..quant.codec import to_fp32
from ..quant.layout import (
    FLOATS,
    BlockLayout,
    arithmetic,
    check_block_size,
    check_codes,
    layout_of,
    memory_order,
)
from .shard import ShardLayout

DYNAMIC = C.CODECS["dynamic"]


def sqrt(x: Tensor) -> Tensor:
    """Correctly rounded square root, in the dtype of x (torch.sqrt on CPU is one ulp off for a fifth of fp32's)."""
    return x.double().sqrt().to(x.dtype)


def number(value: float, x: Tensor) -> float:
    """A number for arithmetic with x: rounded to fp32 unless x is fp64."""
    return value if x.dtype == torch.float64 else to_fp32(value)


def to_blocks(x: Tensor, layout: BlockLayout) -> Tensor:
    """A dense tensor as (blocks, block) in fp32 (fp64 stays), short blocks padded with zeros."""
    if layout.numel == 0:
        return torch.zeros(0, layout.block, dtype=arithmetic(x.dtype), device=x.device)
    if isinstance(layout, ShardLayout) and layout.places is not None:
        return layout.to_blocks(x.to(arithmetic(x.dtype)))
    rows = memory_order(x).to(arithmetic(x.dtype)).reshape(-1, layout.segment)
    pad = layout.blocks_per_segment * layout.block - layout.segment
    return torch.nn.functional.pad(rows, (0, pad)).reshape(-1, layout.block)


def from_blocks(blocks: Tensor, layout: BlockLayout, out: Tensor) -> None:
    """Writes (blocks, block) back into the dense tensor ``out``, rounding once to its dtype."""
    if isinstance(layout, ShardLayout) and layout.places is not None:
        layout.from_blocks(blocks, out)
    elif layout.numel:
        rows = blocks.reshape(layout.numel // layout.segment, -1)[:, : layout.segment]
        memory_order(out).copy_(rows.reshape(-1))


def dither(block: int, step: int, device: torch.device) -> Tensor:
    """The dither u in [0, 1) of each position of a block, fp32."""
    j = torch.arange(block, device=device, dtype=torch.int64)
    bits = (j * C.DITHER_J + step * C.DITHER_STEP % 2**32) % 2**32
    return (bits >> C.DITHER_SHIFT).float() * 2.0**-24


def weight_random(block: int, step: int, bits: int, device: torch.device) -> Tensor:
    """Random whole numbers below 2^bits, int32, with which weights are rounded at each position of a block."""
    j = torch.arange(block, device=device, dtype=torch.int64)
    return ((j * C.WEIGHT_J + step * C.WEIGHT_STEP % 2**32) % 2**32 >> (32 - bits)).int()


@lru_cache
def _dynamic_tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    return (
        torch.tensor(C.dynamic_map(signed), dtype=torch.float32, device=device),
        torch.tensor(C.dynamic_midpoints(signed), dtype=torch.float32, device=device),
    )


def round_signed(a: Tensor, u: Tensor | None) -> Tensor:
    """The magnitude of a signed power code, from ``a = |x| * (N^2 / s)``.

    Without ``u`` the nearest root. With it ``q = floor(sqrt(a))`` or one more: the larger for a share of all u
    that makes the mean of ``q^2`` be ``a``, so that what is stored is x on the average.
    """
    if u is None:
        return sqrt(a).round()
    q = sqrt(a).floor()
    # a - q * q is exact. With u clamped, a value beside a square ends in the same code whether q is the root of
    # that square or one less, so that a fast root may take the place of this one.
    u = u.clamp(C.DITHER_CLAMP, 1 - C.DITHER_CLAMP)
    return q + (a - q * q >= (1 - u) * (2 * q + 1)).float()


def power_levels(signed: bool) -> int:
    """N of the power codec."""
    return C.POWER_LEVELS_SIGNED if signed else C.POWER_LEVELS_UNSIGNED


def holdable(x: Tensor, signed: bool) -> Tensor:
    """Which values codes can hold: finite ones, and where codes are unsigned all negative ones, as 0."""
    return x.isfinite() if signed else x.isfinite() | (x < 0)


def encode(
    x: Tensor, codec: int, signed: bool, u: Tensor | None = None, keep_positive: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes (int8 where signed, else uint8) and scale (blocks,) of x (blocks, block).

    The scale is the largest finite magnitude; where there is none, or its reciprocal overflows, all codes stand for
    zero. A non-finite x is stored as zero where signed, as the largest code where not. Unsigned: a negative x is zero.

    Args:
        u: the dither that the power codec rounds with; None rounds to the nearest code.
        keep_positive: whether an unsigned x above zero takes at least the smallest code above zero where the nearest
            would be zero's. (Power codes always do.)
    """
    valid = holdable(x, signed)
    magnitude = torch.where(valid, x.abs() if signed else torch.where(x > 0, x, 0), 0)
    scale = magnitude.amax(1) if x.numel() else x.new_zeros(x.shape[0])
    levels = power_levels(signed)
    # A tensor over a tensor: number / tensor would be reciprocal() * number, which rounds twice.
    factor = scale.new_tensor(1 if codec == DYNAMIC else levels * levels) / scale
    usable = factor.isfinite()[:, None]
    scaled = magnitude * torch.where(usable, factor[:, None], 0)
    if codec != DYNAMIC:
        if signed:
            q = torch.where(valid & usable, torch.copysign(round_signed(scaled, u), x), 0)
            return q.to(torch.int8), scale
        q = (sqrt(scaled) + (0.5 if u is None else u)).floor().clamp(1, levels)
        q = torch.where(magnitude > 0, q, 0)
        q = torch.where(valid, q, levels)
        return torch.where(usable, q, 0).to(torch.uint8), scale
    _, midpoints = _dynamic_tables(signed, x.device)
    index = torch.bucketize(torch.copysign(scaled, x) if signed else scaled, midpoints)
    q = (index - C.dynamic_zero(signed)) % 256
    if keep_positive and not signed:
        q = torch.where(magnitude > 0, q.clamp(min=1), q)
    q = torch.where(valid, q, 0 if signed else 255)
    q = torch.where(usable, q, 0).to(torch.uint8)
    return (q.view(torch.int8) if signed else q), scale


def decode(q: Tensor, scale: Tensor, codec: int, decay: float = 1.0) -> Tensor:
    """fp32 values of the codes q (blocks, block), times ``decay``; int8 codes are signed, uint8 codes are not."""
    signed = q.dtype == torch.int8
    unit = to_fp32(decay) * scale
    if codec != DYNAMIC:
        levels = power_levels(signed)
        q = q.float()
        return (unit / (levels * levels))[:, None] * (q * q.abs())
    table, _ = _dynamic_tables(signed, q.device)
    return table[(q.view(torch.uint8).long() + C.dynamic_zero(signed)) % 256] * unit[:, None]


def code_blocks(codes: Tensor, layout: BlockLayout) -> Tensor:
    """Codes as (blocks, block), in their dtype."""
    return to_blocks(codes, layout).to(codes.dtype)


def check_codec(codec: int) -> None:
    if codec not in C.CODECS.values():
        raise ValueError(f"codec must be one of {C.CODECS}, got {codec}")


def quantize_blockwise(
    x: Tensor,
    codec: int,
    signed: bool,
    block_size: int,
    step: int | None = None,
    mark_nonfinite: bool = False,
) -> tuple[Tensor, Tensor]:
    """The op behind :func:`memkern.quantize_blockwise`. With a ``step`` it rounds as the optimizers do at that step.

    ``mark_nonfinite``: a block with a value that codes cannot hold has a scale of NaN, so that all of it is decoded to
    NaN, and codes 0; other scales are at most ``LARGEST_MARKED_SCALE``, so that they are decoded to finite values.
    """
    check_codec(codec)
    check_block_size(block_size)
    if x.dtype not in FLOATS:
        raise TypeError(f"x must be float32, bfloat16 or float16, got {x.dtype}")
    layout = layout_of(x, block_size)
    u = None if step is None else dither(layout.block, step, x.device)
    blocks = to_blocks(x, layout)
    q, scale = encode(blocks, codec, signed, u, keep_positive=step is not None)
    if mark_nonfinite:
        marked = ~holdable(blocks, signed).all(1)
        q = torch.where(marked[:, None], 0, q)
        scale = torch.where(marked, math.nan, scale.clamp_max(C.LARGEST_MARKED_SCALE))
    codes = torch.empty_like(x, dtype=q.dtype)
    from_blocks(q, layout, codes)
    return codes, scale.reshape(layout.scale_shape)


def dequantize_blockwise(codes: Tensor, scale: Tensor, codec: int, block_size: int, dtype: torch.dtype) -> Tensor:
    """The op behind :func:`memkern.dequantize_blockwise`."""
    check_codec(codec)
    check_block_size(block_size)
    layout = check_codes(codes, scale, block_size, dtype)
    out = torch.empty_like(codes, dtype=dtype)
    from_blocks(decode(code_blocks(codes, layout), scale.reshape(-1), codec), layout, out)
    return out
