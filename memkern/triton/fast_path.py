"""Correctly rounded roots and divisions without a range check of each. Mirror: ``csrc/cuda/fast_path.cuh``.

``sqrt_rn`` and ``div_rn`` are about ten instructions, of which four send operands outside of a middle range to a slow
path. A kernel checks the range once for a tile (:func:`in_fast_range`) and then uses functions without these four.

What that gains on a GPU is not known: benchmarks/results has no times without this path.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codec import POWER, REFINE_ROOTS, encode_in_range, levels_squared

# As in csrc/cuda/fast_path.cuh.
MIN_RADICAND, MAX_RADICAND = tl.constexpr(2.0**-101), tl.constexpr(2.0**40)
MIN_NUMERATOR, MAX_NUMERATOR = tl.constexpr(2.0**-64), tl.constexpr(2.0**60)
MIN_DENOMINATOR, MAX_DENOMINATOR = tl.constexpr(2.0**-51), tl.constexpr(2.0**21)


@triton.constexpr_function
def has_fast_path(kind):
    """Whether states of a KIND have it: power codes do, whose scales are maxima that the check needs too.

    Not on AMD's GPUs, where each root is refined, which takes as long as sqrt_rn.
    """
    return kind == POWER and not REFINE_ROOTS


@triton.jit
def _maximum_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def absmax_or_nan(x, SIGNED: tl.constexpr):
    """The largest magnitude of each block, NaN where an element is. Not SIGNED: no x is negative."""
    return tl.reduce(tl.abs(x) if SIGNED else x, 1, _maximum_or_nan)


@triton.jit
def _by_access(x, VECTOR: tl.constexpr):
    """(blocks, block) as (blocks, accesses, VECTOR): one thread has all elements of an access."""
    return tl.reshape(x, (x.shape[0], x.shape[1] // VECTOR, VECTOR))


@triton.jit
def in_fast_range(m, v, m_absmax, v_absmax, eps, mask, VECTOR: tl.constexpr, FLAT: tl.constexpr):
    """Whether all roots and divisions of a tile's m / (sqrt(v) + eps) are in the range of these functions.

    Outside of the mask m and v are 0. FLAT: such a tile is a tensor's last, and counts as out of range.
    """
    least_m = tl.min(_by_access(tl.abs(m), VECTOR), axis=2)
    least_v = tl.min(_by_access(v, VECTOR), axis=2)
    small = (least_m < MIN_NUMERATOR) | (least_v < MIN_RADICAND)
    if not FLAT:
        small = small & (tl.max(_by_access(mask.to(tl.int32), VECTOR), axis=2) != 0)
    large = ((m_absmax <= MAX_NUMERATOR) & (v_absmax <= MAX_RADICAND)) == 0  # so is NaN
    outside = tl.max(tl.max(small.to(tl.int32), axis=1) | large.to(tl.int32), axis=0)
    return (outside == 0) & (eps >= MIN_DENOMINATOR) & (eps <= MAX_DENOMINATOR / 2)


@triton.jit
def fast_divide(a, b):
    """a / b, correctly rounded, for b > 0: seven instructions. The reciprocal's first guess is a root's square."""
    root = tl.math.rsqrt(b)
    guess = root * root
    reciprocal = tl.math.fma(guess, tl.math.fma(-b, guess, 1.0), guess)
    quotient = a * reciprocal
    # Minus (b * quotient - a) * reciprocal: a quotient of -0 stays -0.
    return tl.math.fma(-reciprocal, tl.math.fma(b, quotient, -a), quotient)


@triton.jit
def fast_codes(x, absmax, u, KIND: tl.constexpr, SIGNED: tl.constexpr):
    """Codes of a moment of which no element is 0, and whose blocks' largest magnitudes are known."""
    square: tl.constexpr = levels_squared(SIGNED)
    return encode_in_range(x, fast_divide(square, absmax), u, KIND, SIGNED)
