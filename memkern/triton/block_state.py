"""Loads and dequantizes blocks of a moment, quantizes and stores them. Mirror: ``csrc/cuda/block_state.cuh``."""

from __future__ import annotations

import triton
import triton.language as tl

from .codec import FP32, decode, decode_unit, encode
from .tile import pointer


@triton.jit
def moment_pointer(address, start, KIND: tl.constexpr, SIGNED: tl.constexpr, VECTOR: tl.constexpr):
    """A pointer to element ``start`` of a moment, of the dtype that it is stored in."""
    if KIND == FP32:
        return pointer(address, start, tl.float32, VECTOR)
    elif SIGNED:
        return pointer(address, start, tl.int8, VECTOR)
    else:
        return pointer(address, start, tl.uint8, VECTOR)


@triton.jit
def dequantize(x, scale, decay, tables, KIND: tl.constexpr, SIGNED: tl.constexpr):
    """Dequantizes a tile of a moment, times ``decay``, which multiplies the scale: once per block, not per element.

    Unsigned power codes give w = sqrt(v).
    """
    if KIND == FP32:
        return decay * x
    else:
        return decode(x, decode_unit(scale, decay, KIND, SIGNED), tables, KIND, SIGNED)


@triton.jit
def load_moment(address, tile, KIND: tl.constexpr, SIGNED: tl.constexpr, VECTOR: tl.constexpr):
    """A tile (:func:`tile_of`) of a moment: its codes, or fp32."""
    start, offset, mask, _, _ = tile
    return tl.load(moment_pointer(address, start, KIND, SIGNED, VECTOR) + offset, mask=mask, other=0)


@triton.jit
def load_scale(scale, tile, KIND: tl.constexpr):
    if KIND == FP32:
        return 0.0
    else:
        _, _, _, row, row_mask = tile
        return tl.load(scale + row, mask=row_mask, other=0.0)


@triton.jit
def store_moment(
    x, address, scale, u, tile, tables, KIND: tl.constexpr, SIGNED: tl.constexpr, VECTOR: tl.constexpr
):
    """Quantizes a tile of a moment and stores codes and scales, or stores fp32. ``u``: the dither."""
    start, offset, mask, row, row_mask = tile
    at = moment_pointer(address, start, KIND, SIGNED, VECTOR)
    if KIND == FP32:
        tl.store(at + offset, x, mask=mask)
    else:
        codes, s = encode(x, u, tables, KIND, SIGNED, True)
        tl.store(at + offset, codes, mask=mask)
        tl.store(scale + row, s, mask=row_mask)
