"""The codecs' formulas (``memkern.quant.codec``) on tiles of (blocks, block). Mirrors: ``csrc/core/power.h`` and
``csrc/core/dynamic.h``.

Every operation rounds once, to nearest: kernels are compiled with ``enable_fp_fusion=False``.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quant import codec as C
from .launch import allocate_outside_of_graphs

# How a moment is stored, the KIND of a kernel: fp32, or in codes, as 1 more than the codec's number in CODECS.
FP32 = tl.constexpr(0)
POWER = tl.constexpr(1)
DYNAMIC = tl.constexpr(2)

_UNSIGNED_LEVELS = tl.constexpr(C.POWER_LEVELS_UNSIGNED)
_SIGNED_SQUARE = tl.constexpr(float(C.POWER_LEVELS_SIGNED**2))
_UNSIGNED_SQUARE = tl.constexpr(float(C.POWER_LEVELS_UNSIGNED**2))
_SIGNED_INVERSE = tl.constexpr(C.to_fp32(1.0 / C.POWER_LEVELS_SIGNED**2))
_UNSIGNED_INVERSE = tl.constexpr(C.to_fp32(1.0 / C.POWER_LEVELS_UNSIGNED**2))
_DITHER_J = tl.constexpr(C.DITHER_J)
_DITHER_SHIFT = tl.constexpr(C.DITHER_SHIFT)
_DITHER_CLAMP = tl.constexpr(C.DITHER_CLAMP)
_DYNAMIC_ZERO = tl.constexpr(C.dynamic_zero(True))
_INF = tl.constexpr(float("inf"))
_TINY = tl.constexpr(2.0**-100)  # the least t for which code_root is exact
_SIGN_BIT = tl.constexpr(-(2**31))
REFINE_ROOTS = tl.constexpr(torch.version.hip is not None)
# For |c| < 2^22 the sum c + 1.5 * 2^23 is rounded to an integer, and its low bits are those of rint(c).
_TO_INT = tl.constexpr(1.5 * 2**23)

assert C.dynamic_zero(False) == 0


@lru_cache
def dynamic_tables(device: torch.device) -> Tensor:
    """Map and boundaries of the dynamic codec, signed then unsigned: 4 x 256 fp32."""
    rows = chain.from_iterable((C.dynamic_map(signed), (*C.dynamic_midpoints(signed), 0.0)) for signed in (True, False))
    values = [*chain.from_iterable(rows)]
    return allocate_outside_of_graphs(lambda: torch.tensor(values, dtype=torch.float32, device=device), device)


@triton.constexpr_function
def levels_squared(SIGNED):
    """N^2 of power codes, fp32."""
    return _SIGNED_SQUARE if SIGNED else _UNSIGNED_SQUARE


@triton.jit
def block_scale(x):
    """The largest finite magnitude of each block."""
    finite = tl.math.fma(x, 0.0, x)  # NaN where x is not finite; a maximum ignores NaN
    return tl.maximum(tl.max(tl.abs(finite), axis=1), 0.0)  # 0 for a block of NaN


@triton.jit
def encode_factor(scale, KIND: tl.constexpr, SIGNED: tl.constexpr):
    """The factor of a value before it is encoded; 0 where it overflows: the block's codes are then zeros."""
    factor = tl.math.div_rn(1.0 if KIND == DYNAMIC else levels_squared(SIGNED), scale)
    return tl.where(factor < _INF, factor, 0.0)


@triton.jit
def decode_unit(scale, decay, KIND: tl.constexpr, SIGNED: tl.constexpr):
    """The factor of a decoded value: decay * scale, over N^2 for power codes."""
    unit = decay * scale
    if KIND != DYNAMIC:
        # unit / N^2, correctly rounded, in three instructions: the inner fma is the exact remainder, because N^2 is an
        # integer of 16 bits, and no quotient is a tie, because N^2 is odd. (Checked for every float, denormals too.)
        square: tl.constexpr = levels_squared(SIGNED)
        inverse: tl.constexpr = _SIGNED_INVERSE if SIGNED else _UNSIGNED_INVERSE
        q = unit * inverse
        unit = tl.math.fma(tl.math.fma(q, -square, unit), inverse, q)
    return unit


@triton.jit
def decode(codes, unit, tables, KIND: tl.constexpr, SIGNED: tl.constexpr):
    """fp32 values of int8 (signed) or uint8 codes; ``unit`` has one entry a block."""
    if KIND == DYNAMIC:
        return _decode_dynamic(codes.to(tl.int32), unit, tables, SIGNED)
    else:
        q = codes.to(tl.float32)
        return unit[:, None] * (q * tl.abs(q) if SIGNED else q * q)


@triton.jit
def _decode_dynamic(index, unit, tables, SIGNED: tl.constexpr):
    if SIGNED:
        index = (index + _DYNAMIC_ZERO) & 255
        return tl.load(tables + index) * unit[:, None]
    else:
        return tl.load(tables + 512 + index) * unit[:, None]


@triton.jit
def dither(j, step_offset):
    """The dither u in [0, 1) of position j of a block; ``step_offset``: step * DITHER_STEP, uint32."""
    bits = j.to(tl.uint32) * _DITHER_J + step_offset
    return (bits >> _DITHER_SHIFT).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def code_root(t):
    """sqrt(t), correctly rounded, for t from 2^-100 to 255^2. For smaller t NaN or less than 2^-49; NaN for infinity.

    The fast path of NVIDIA's sqrt.rn without its branch for other values: 5 instructions instead of 10. On AMD's GPUs a
    Newton step refines the estimate first; then the root is correctly rounded whatever the estimate's last three bits.
    """
    r = tl.math.rsqrt(t)
    s, h = t * r, 0.5 * r
    if REFINE_ROOTS:
        d = tl.math.fma(-h, s, 0.5)
        s, h = tl.math.fma(s, d, s), tl.math.fma(h, d, h)
    return tl.math.fma(tl.math.fma(-s, s, t), h, s)


@triton.jit
def encode_power_signed(x, factor, u, DITHERED: tl.constexpr, IN_RANGE: tl.constexpr):
    """``u``: the dither, (1, block); not DITHERED, the nearest code. IN_RANGE: no x is 0, and all are finite."""
    a = tl.abs(x) * factor[:, None]
    if DITHERED:
        # q is the whole number below an approximate root: off by one only where a is next to a square, and there the
        # comparison ends in the same code. a - q q is exact, one_minus_u (2 q + 1) rounded once. 0 and inf give NaN.
        one_minus_u = tl.minimum(tl.maximum(1.0 - u, _DITHER_CLAMP), 1.0 - _DITHER_CLAMP)
        q = (tl.math.fma(a, tl.math.rsqrt(a), -0.5) + _TO_INT) - _TO_INT
        up = tl.math.fma(-q, q, a) >= tl.math.fma(one_minus_u + one_minus_u, q, one_minus_u)
        c = tl.where(up, q + 1.0, q)
    else:
        c = code_root(a)
    if not IN_RANGE:
        c = tl.maximum(c, 0.0)  # code 0 for NaN
    signed = c.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & _SIGN_BIT)
    return (signed.to(tl.float32, bitcast=True) + _TO_INT).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def encode_power_unsigned(x, factor, u, LEVELS: tl.constexpr, IN_RANGE: tl.constexpr):
    """``u``: 1/2 for the nearest code, or the dither; (1, block). IN_RANGE: x > 0, finite, and so are the products."""
    t = x * factor[:, None]
    if IN_RANGE:
        return tl.maximum(tl.minimum(code_root(t) + u, 1.0 * LEVELS), 1.0).to(tl.int32).to(tl.uint8)
    else:
        usable = factor > 0
        lowest = tl.where(usable, 1.0, 0.0)[:, None]
        highest = tl.where(usable, 1.0 * LEVELS, 0.0)[:, None]
        t = tl.maximum(t, _TINY, propagate_nan=tl.PropagateNan.ALL)
        q = code_root(t) + u
        q = tl.minimum(q, highest)  # the largest code for NaN
        q = tl.maximum(q, tl.where(x > 0, lowest, 0.0))
        return q.to(tl.int32).to(tl.uint8)


@triton.jit
def encode_dynamic(x, factor, tables, SIGNED: tl.constexpr, DITHERED: tl.constexpr):
    """The entry nearest to x / scale (a tie takes the lower one): computed, then corrected by two comparisons."""
    finite = tl.abs(x) < _INF
    t = tl.where(finite, x, 0.0) * factor[:, None]
    magnitude = tl.abs(t)
    # A decade, from 10^-7 up, has ``entries`` of each sign, evenly spaced; nearer to zero are ``entries_before``.
    entries = tl.full(magnitude.shape, 1.0 if SIGNED else 2.0, tl.float32)
    entries_before = tl.where(magnitude > 1e-7, 1.0, 0.0)
    entries = tl.where(magnitude > 1e-7, entries, 0.0)
    inverse = tl.full(magnitude.shape, 1e6, tl.float32)
    decade = 1e-6
    for _ in tl.static_range(6):
        above = magnitude > decade
        entries_before = tl.where(above, entries_before + entries, entries_before)
        entries = tl.where(above, entries + entries, entries)
        inverse = tl.where(above, inverse * 0.1, inverse)
        decade = decade * 10.0
    rank = (entries_before + tl.maximum((magnitude * inverse - 0.1) * (entries * 1.1111112), 0.0)).to(tl.int32)
    if SIGNED:
        rank = _DYNAMIC_ZERO + tl.where(t < 0, -rank, rank)
    q = tl.minimum(tl.maximum(rank, 0), 254)
    # q, an index, is at most one off: by fp32 rounding near a boundary, and because a midpoint between two decades is
    # not the decade's edge.
    midpoints = tables + (256 if SIGNED else 768)
    lower = (q > 0) & (t <= tl.load(midpoints + tl.maximum(q - 1, 0)))
    q = tl.where(lower, q - 1, q)
    q = tl.where(t > tl.load(midpoints + q), q + 1, q)
    usable = (factor > 0)[:, None]
    if DITHERED and not SIGNED:
        q = tl.maximum(q, tl.where(x > 0, 1, 0))
    if SIGNED:
        return tl.where(finite & usable, q - _DYNAMIC_ZERO, 0).to(tl.int8)
    else:
        return tl.where(usable, tl.where(finite, q, 255), 0).to(tl.uint8)


@triton.jit
def encode(x, u, tables, KIND: tl.constexpr, SIGNED: tl.constexpr, DITHERED: tl.constexpr):
    """Codes and scales of x (blocks, block), x >= 0 or NaN where not signed.

    DITHERED: rounded as the optimizers do, with the dither ``u``; else to the nearest, and ``u`` is 1/2.
    A non-finite x is stored as zero where signed, as the largest code where not, and never reaches the scale.
    """
    scale = block_scale(x)
    factor = encode_factor(scale, KIND, SIGNED)
    if KIND == DYNAMIC:
        codes = encode_dynamic(x, factor, tables, SIGNED, DITHERED)
    elif SIGNED:
        codes = encode_power_signed(x, factor, u, DITHERED, False)
    else:
        codes = encode_power_unsigned(x, factor, u, _UNSIGNED_LEVELS, False)
    return codes, scale


@triton.jit
def encode_in_range(x, factor, u, KIND: tl.constexpr, SIGNED: tl.constexpr):
    """Power codes, dithered, where no x is 0 and x and their products with the blocks' factors are finite."""
    if SIGNED:
        return encode_power_signed(x, factor, u, True, True)
    else:
        return encode_power_unsigned(x, factor, u, _UNSIGNED_LEVELS, True)
