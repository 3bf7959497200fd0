"""A moment's way out of its storage and back; what Adam, Lion and LAMB share. Twin: ``csrc/cpu/moment.h``."""

from __future__ import annotations

import triton
import triton.language as tl

from .codec import FP32, code_unit, decode, encode
from .tiles import pointer


@triton.jit
def moment_pointer(address, KIND: tl.constexpr, SIGNED: tl.constexpr, VECTOR: tl.constexpr):
    """The address of a moment as a pointer to what it is stored as."""
    if KIND == FP32:
        return pointer(address, tl.float32, VECTOR)
    elif SIGNED:
        return pointer(address, tl.int8, VECTOR)
    else:
        return pointer(address, tl.uint8, VECTOR)


@triton.jit
def load_moment(
    state, scale, decay, offset, mask, row, row_mask, tables, KIND: tl.constexpr, SIGNED: tl.constexpr
):
    """A tile of a moment times ``decay``, which goes into the scale. Unsigned power codes give w = sqrt(v)."""
    x = tl.load(state + offset, mask=mask, other=0)
    if KIND == FP32:
        return decay * x
    unit = code_unit(tl.load(scale + row, mask=row_mask, other=0.0), decay, KIND, SIGNED)
    return decode(x, unit, tables, KIND, SIGNED)


@triton.jit
def store_moment(
    x, state, scale, u, offset, mask, row, row_mask, tables, KIND: tl.constexpr, SIGNED: tl.constexpr
):
    """The inverse of :func:`load_moment`. ``u``: the dither of unsigned power codes."""
    if KIND == FP32:
        tl.store(state + offset, x, mask=mask)
    else:
        codes, s = encode(x, u, tables, KIND, SIGNED)
        tl.store(state + offset, codes, mask=mask)
        tl.store(scale + row, s, mask=row_mask)
