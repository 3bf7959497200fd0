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
    at = moment_pointer(address, tile[0], KIND, SIGNED, VECTOR) + tile[1]
    return tl.load(at, mask=tile[2], other=0)


@triton.jit
def load_scale(scale, tile, KIND: tl.constexpr):
    if KIND == FP32:
        return 0.0
    else:
        return tl.load(scale + tile[3], mask=tile[4], other=0.0)


@triton.jit
def store_moment(x, address, scale, u, tile, tables, KIND: tl.constexpr, SIGNED: tl.constexpr, VECTOR: tl.constexpr):
    """Quantizes a tile of a moment and stores codes and scales, or stores fp32. ``u``: the dither."""
    if KIND == FP32:
        tl.store(moment_pointer(address, tile[0], KIND, SIGNED, VECTOR) + tile[1], x, mask=tile[2])
    else:
        codes, absmax = encode(x, u, tables, KIND, SIGNED, True)
        store_codes(codes, absmax, address, scale, tile, KIND, SIGNED, VECTOR)


@triton.jit
def store_codes(codes, absmax, address, scale, tile, KIND: tl.constexpr, SIGNED: tl.constexpr, VECTOR: tl.constexpr):
    """Stores a tile's codes and its blocks' new scales ``absmax``."""
    at = moment_pointer(address, tile[0], KIND, SIGNED, VECTOR)
    tl.store(at + tile[1], codes, mask=tile[2])
    tl.store(scale + tile[3], absmax, mask=tile[4])
