"""memkern::quantize_affine and memkern::dequantize_affine. Mirrors: ``csrc/core/affine.h``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quant import codec as C
from ..quant.layout import BlockLayout
from ..reference.affine import check_dequantize, check_quantize, to_halves
from .blockwise import layout_args, shape_of
from .codec import dither
from .launch import cdiv, guard, options_of
from .tile import pointer, tile_of

_INF = tl.constexpr(float("inf"))
_TINY = tl.constexpr(2.0**-126)
_FARTHEST = tl.constexpr(1.0 / C.AFFINE_FARTHEST)
# For |c| < 2^22 the sum c + 1.5 * 2^23 is rounded to an integer, and its low bits are those of rint(c).
_TO_INT = tl.constexpr(1.5 * 2**23)
_JIT = {
    "do_not_specialize": ["numel", "segment", "block", "per_segment", "blocks", "seed_offset"],
    "do_not_specialize_on_alignment": ["values", "codes", "scales", "zero_points", "lows", "highs"],
}


@triton.jit
def finite_range(x, mask):
    """The least and the largest finite value of each block; 0 where there is none."""
    usable = mask & (tl.abs(x) < _INF)
    low = tl.min(tl.where(usable, x, _INF), axis=1)
    high = tl.max(tl.where(usable, x, -_INF), axis=1)
    none = low > high
    return tl.where(none, 0.0, low), tl.where(none, 0.0, high)


@triton.jit
def parameters(low, high, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Scale and zero point, both fp32, of ranges [low, high]."""
    size = tl.maximum(tl.abs(low), tl.abs(high))
    constant = low == high
    step = tl.math.div_rn(high * 0.5 - low * 0.5, (MOST - LEAST) * 0.5)
    scale = tl.maximum(tl.maximum(step, size * _FARTHEST), _TINY)
    zero_point = ((LEAST - tl.math.div_rn(low, scale)) + _TO_INT) - _TO_INT
    sign = tl.where(low > 0, 1.0, tl.where(low < 0, -1.0, 0.0))
    scale = tl.where(constant, tl.where(size > 0, size, 1.0), scale)
    return scale, tl.where(constant, LEAST - sign, zero_point)


@triton.jit
def encode(x, scale, zero_point, u, LEAST: tl.constexpr, MOST: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Codes in the low byte of int32. ``u``: in [0, 1), of the shape of x."""
    z = zero_point[:, None]
    place = tl.math.div_rn(x, scale[:, None]) + z
    if STOCHASTIC:
        place = tl.floor(place + u)
    place = tl.where(x != x, z, place)
    return (tl.minimum(tl.maximum(place, LEAST), MOST) + _TO_INT).to(tl.int32, bitcast=True)


@triton.jit(**_JIT)
def quantize_affine_tiles(
    values, codes, scales, zero_points, lows, highs, seed_offset,
    numel, segment, block, per_segment, blocks,
    BITS: tl.constexpr, GIVEN: tl.constexpr, RUNS: tl.constexpr, PACKED: tl.constexpr, STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    LEAST: tl.constexpr = -1.0 * (1 << (BITS - 1))
    MOST: tl.constexpr = 1.0 * ((1 << (BITS - 1)) - 1)
    start, offset, mask, row, row_mask = tile_of(
        tl.program_id(0), (numel, segment, block, per_segment, blocks), ROWS, BLOCK, VECTOR, FLAT
    )
    x = tl.load(pointer(values, start, values.dtype.element_ty, VECTOR) + offset, mask=mask, other=0.0)
    x = x.to(tl.float32)
    if RUNS:
        # Blocks of a run have a scale in common, and its first one stores it.
        first_row = row // per_segment * per_segment == row
        row = row // per_segment
    if GIVEN:
        low = tl.load(lows + row, mask=row_mask, other=0.0)
        high = tl.load(highs + row, mask=row_mask, other=0.0)
    else:
        low, high = finite_range(x, mask)
    scale, zero_point = parameters(low, high, LEAST, MOST)
    u = dither(start + offset, seed_offset.to(tl.uint32)) if STOCHASTIC else 0.0
    q = encode(x, scale, zero_point, u, LEAST, MOST, STOCHASTIC)
    if PACKED:
        first, second = tl.split(tl.reshape(tl.where(mask, q, 0), (ROWS, BLOCK // 2, 2)))
        place, _ = tl.split(tl.reshape(offset, (ROWS, BLOCK // 2, 2)))
        wanted, _ = tl.split(tl.reshape(mask.to(tl.int32), (ROWS, BLOCK // 2, 2)))
        pair = ((first & 15) | ((second & 15) << 4)).to(tl.uint8)
        tl.store(codes + start // 2 + place // 2, pair, mask=wanted != 0)
    else:
        tl.store(pointer(codes, start, tl.int8, VECTOR) + offset, q.to(tl.int8), mask=mask)
    if RUNS:
        row_mask = row_mask & first_row
    tl.store(scales + row, scale, mask=row_mask)
    tl.store(zero_points + row, zero_point.to(tl.int32), mask=row_mask)


@triton.jit(**_JIT)
def dequantize_affine_tiles(
    values, codes, scales, zero_points,
    numel, segment, block, per_segment, blocks,
    RUNS: tl.constexpr, PACKED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    start, offset, mask, row, row_mask = tile_of(
        tl.program_id(0), (numel, segment, block, per_segment, blocks), ROWS, BLOCK, VECTOR, FLAT
    )
    row = row // per_segment if RUNS else row
    scale = tl.load(scales + row, mask=row_mask, other=0.0)
    zero_point = tl.load(zero_points + row, mask=row_mask, other=0).to(tl.float32)
    if PACKED:
        place = start + offset
        q = tl.load(codes + place // 2, mask=mask, other=0).to(tl.int32)
        q = (((q >> ((place % 2) * 4).to(tl.int32)) & 15) ^ 8) - 8
    else:
        q = tl.load(pointer(codes, start, tl.int8, VECTOR) + offset, mask=mask, other=0)
    x = scale[:, None] * (q.to(tl.float32) - zero_point[:, None])
    at = pointer(values, start, values.dtype.element_ty, VECTOR) + offset
    tl.store(at, x.to(values.dtype.element_ty), mask=mask)


def _pieces(layout: BlockLayout, runs: bool) -> BlockLayout:
    """The layout that kernels work on: runs are cut into blocks, whose scale is their run's."""
    return layout._replace(block=min(layout.segment, C.AFFINE_RUN)) if runs else layout


def _tile(layout: BlockLayout, block_size: int | None, values: Tensor, codes: Tensor) -> dict[str, int]:
    return shape_of(layout, block_size or max(layout.block, C.MIN_BLOCK_SIZE), values, codes)


def _has_whole_bytes(layout: BlockLayout) -> bool:
    """Whether every byte with two codes of 4 bits is within a block."""
    return (layout.block % 2 == 0 or layout.blocks_per_segment == 1) and (
        layout.segment % 2 == 0 or layout.segment == layout.numel
    )


def quantize_affine(
    x: Tensor,
    low: Tensor | None,
    high: Tensor | None,
    bits: int,
    block_size: int | None,
    seed: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op behind :func:`memkern.quantize_affine`."""
    layout = check_quantize(x, low, high, bits, block_size)
    scale = x.new_empty(layout.scale_shape, dtype=torch.float32)
    zero_point = torch.empty_like(scale, dtype=torch.int32)
    layout = _pieces(layout, block_size is None)
    packed = bits == 4 and layout.blocks > 0 and _has_whole_bytes(layout)
    halves = ((x.numel() + 1) // 2,)
    codes = x.new_empty(halves, dtype=torch.uint8) if packed else torch.empty_like(x, dtype=torch.int8)
    if layout.numel:
        tile = _tile(layout, block_size, x, codes)
        ranges = (scale, scale) if low is None or high is None else (low.contiguous(), high.contiguous())
        with guard(x.device):
            quantize_affine_tiles[(cdiv(layout.blocks, tile["ROWS"]),)](
                x, codes, scale, zero_point, *ranges, (seed or 0) * C.DITHER_STEP % 2**32,
                *layout_args(layout),
                BITS=bits, GIVEN=low is not None, RUNS=block_size is None,
                PACKED=packed, STOCHASTIC=seed is not None,
                **tile, **options_of(tile["BLOCK"]),
            )  # fmt: skip
    return codes if bits == 8 or packed else to_halves(codes), scale, zero_point


def dequantize_affine(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    bits: int,
    block_size: int | None,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """The op behind :func:`memkern.dequantize_affine`."""
    layout, out = check_dequantize(codes, scale, zero_point, bits, block_size, shape, dtype)
    layout = _pieces(layout, block_size is None)
    if layout.numel:
        tile = _tile(layout, block_size, out, codes)
        with guard(codes.device):
            dequantize_affine_tiles[(cdiv(layout.blocks, tile["ROWS"]),)](
                out, codes.contiguous() if bits == 4 else codes, scale.contiguous(), zero_point.contiguous(),
                *layout_args(layout),
                RUNS=block_size is None, PACKED=bits == 4, **tile, **options_of(tile["BLOCK"]),
            )  # fmt: skip
    return out
