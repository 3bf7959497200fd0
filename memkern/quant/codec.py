"""The codecs' constants and tables: the one source that C++, Triton and the reference read.

It imports the standard library only, because ``csrc/generate.py`` runs this file to write ``csrc/core/tables.h``.

A block of up to ``block_size`` values x is stored as 8-bit codes q and one fp32 scale ``s``, the block's largest finite
magnitude.

``power``
    A square-root law. N is the largest code: 127 where values are signed, else 255 (for values that are not negative).

    Decoded: ``x = (s / N^2) * (q * |q|)``.

    Encoded, with ``a = |x| * (N^2 / s)``, whose square root is the code before it is rounded:

    - signed, to the nearest: ``q = sign(x) * rint(sqrt(a))``
    - unsigned, to the nearest: ``q = min(255, max(1, floor(sqrt(a) + 1/2)))`` for ``x > 0``, else 0
    - signed, with a dither u: ``|q| = floor(sqrt(a))``, plus one where ``a - q^2 >= (1 - u) * (2 * |q| + 1)``
    - unsigned, with a dither u: as to the nearest, with u in place of 1/2

    Optimizers round with the dither, a number u from 0 to below 1 that differs between elements and between steps
    (``DITHER_J`` below). For signed codes it is clamped to [2^-14, 1 - 2^-14]. The first moment m is signed; the
    average of its decoded values over the steps has no bias. The second moment v is stored unsigned as ``w = sqrt(v)``;
    the average of its codes has no bias. Rounded to the nearest, both would freeze where gradients stop. With
    beta2 = 0.999 a step takes 0.05 % from w and so 0.025 % from its code, which even for 255 is less than half a code.
    With beta1 = 0.9 it takes 10 % from m and so 5 % from its code, which up to 9 is less than half a code.
``dynamic``
    The dynamic tree map of Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861):
    the nearest of 256 fixed values, entry for entry those of bitsandbytes. A code is the entry's index less that of 0,
    modulo 256, so that code 0 is 0 here too. The second moment is stored as ``v``; in the optimizers a ``v`` above 0
    takes at least the smallest code above 0, as ``m / (sqrt(0) + eps)`` would be a step of any size. Always rounded to
    the nearest, it freezes: where the gradients of all elements of a block but one fall to a tenth, their ``sqrt(v)``
    is still 5.4 times too large after 6,000 steps (docs/numerics.md).
"""

from __future__ import annotations

import functools
import math
import struct
from itertools import pairwise

CODECS = {"power": 0, "dynamic": 1}
"""Codec names and the numbers that stand for them in op arguments."""

ACTIVATIONS = {
    "gelu": 0,
    "gelu_tanh": 1,
    "silu": 2,
    "tanh": 3,
    "sigmoid": 4,
    "softplus": 5,
    "mish": 6,
    "hardswish": 7,
    "quick_gelu": 8,
    "relu": 9,
    "leaky_relu": 10,
    "hardtanh": 11,
    "elu": 12,
    "celu": 13,
    "selu": 14,
    "logsigmoid": 15,
    "softsign": 16,
    "tanhshrink": 17,
    "hardsigmoid": 18,
    "hardshrink": 19,
    "softshrink": 20,
    "threshold": 21,
}
"""Activation names and the numbers that stand for them in op arguments."""

PLAIN, EVEN, ODD = 0, 1, 2
"""Symmetries of an activation's derivative d: none; d(-x) = d(x); d(-x) = 2 d(0) - d(x)."""

# Limits of an activation's table (memkern/fewbit/levels.py): bits of a code, ends of intervals, and a polynomial's
# coefficients.
MAX_BITS = 4
MAX_THRESHOLDS = 64
MAX_COEFFICIENTS = 16

PLANE_ALIGNMENT = 16
"""A bit plane is padded to a multiple of this many bytes."""


def plane_bytes(numel: int) -> int:
    """Bytes of one bit plane of ``numel`` elements."""
    return -(-numel // (8 * PLANE_ALIGNMENT)) * PLANE_ALIGNMENT


POWER_LEVELS_SIGNED = 127  # N above
POWER_LEVELS_UNSIGNED = 255

# The dither of the element at position j of its block:
#     u = (((j * DITHER_J + step * DITHER_STEP) mod 2^32) >> DITHER_SHIFT) * 2^-24
# DITHER_J is 2^32 over the golden ratio, so that u is evenly spread along a block.
DITHER_J = 2654435769
DITHER_STEP = 1640531527
DITHER_SHIFT = 8
DITHER_CLAMP = 2.0**-14
"""Signed codes keep u at least this far from 0 and 1: memkern/reference/blockwise.py says why."""

WEIGHTS = {"nearest": 0, "stochastic": 1, "bf16+8": 2, "bf16+16": 3}
"""How a step stores a parameter, and the numbers that stand for it in op arguments: rounded to the nearest value of its
dtype, or, bf16 alone, stochastically, or with its rounding error in 8 or 16 bits.

A bf16 weight and its error are the bits of an fp32 number in two pieces. With these bits as a whole number ``bits``, of
which the low d are dropped (``WEIGHT_DROPPED_BITS``), a step stores its result so::

    r = ((j * WEIGHT_J + step * WEIGHT_STEP) mod 2^32) >> (32 - d)      random, 0 <= r < 2^d; j: position in the block
    bits = (bits + r) & ~(2^d - 1)                                      drops the low d bits
    weight = (bits + 2^15) >> 16                                        to the nearest bf16, ties away from zero
    error = bits - (weight << 16)                                       from -2^15 to 2^15 - 1; its low d bits are 0 and
                                                                        are not stored

The next step begins with::

    bits = (weight << 16) + error                                       weight << 16 where that is NaN

It goes on from the weight that is there, whoever has written it, as an error is relative to it.
"""
WEIGHT_DROPPED_BITS = {"stochastic": 16, "bf16+8": 8, "bf16+16": 0}  # d above
# 2^32 times the fractional parts of sqrt(2) and sqrt(3): independent of the dither's golden ratio.
WEIGHT_J = 1779033703
WEIGHT_STEP = 3144134277
LEAST_NORM = 2.0**-100
"""A weight's norm of at most this counts as 0 in trust ratios. A zeroed bf16 layer keeps errors beside its zeros,
numbers below 2^-133: with a ratio made of them it would never start again."""

DYNAMIC_EXPONENTS = 7
"""Decades of the dynamic map, 10^-7 to 1; decade i holds 2^i entries (of each sign) or 2^(i + 1) (unsigned)."""

MIN_BLOCK_SIZE = 8
MAX_BLOCK_SIZE = 4096


def to_fp32(x: float) -> float:
    """``x`` rounded once to fp32."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


LARGEST_MARKED_SCALE = to_fp32(3.3e38)
"""The largest scale that quantize_blockwise stores with mark_nonfinite: from finfo.max, which masks hold, decoding
would round up to infinity."""


def _down_to_fp32(x: float) -> float:
    """The largest fp32 number that is not above ``x``."""
    y = to_fp32(x)
    if y <= x:
        return y
    bits = struct.unpack("i", struct.pack("f", y))[0]
    return float(struct.unpack("f", struct.pack("i", bits + (1 if y < 0 else -1)))[0])


def _linspace_fp32(start: float, end: float, n: int) -> list[float]:
    """torch.linspace in fp32, of which bitsandbytes makes its maps: from both ends towards the middle.

    A product and a sum are rounded once, as in a fused multiply-add: the product is exact in a Python float.
    """
    start, end = to_fp32(start), to_fp32(end)
    step = to_fp32(to_fp32(end - start) / (n - 1))
    half = n // 2
    return [to_fp32(start + step * i) if i < half else to_fp32(end - step * (n - i - 1)) for i in range(n)]


@functools.cache
def dynamic_map(signed: bool) -> tuple[float, ...]:
    """The 256 fp32 values of the dynamic map, ascending. A value's code is its index less :func:`dynamic_zero`.

    Source: ``create_dynamic_map`` of bitsandbytes (max_exponent_bits 7, total_bits 8).
    """
    values = [0.0, 1.0]
    for i in range(DYNAMIC_EXPONENTS):
        edges = _linspace_fp32(0.1, 1.0, 2 ** (i if signed else i + 1) + 1)
        decade = to_fp32(10.0 ** (i - DYNAMIC_EXPONENTS + 1))
        means = [to_fp32(decade * to_fp32(to_fp32(a + b) / 2)) for a, b in pairwise(edges)]
        values += means
        if signed:
            values += [-m for m in means]
    return tuple(sorted(values))


def dynamic_midpoints(signed: bool) -> tuple[float, ...]:
    """255 fp32 boundaries: the index of the entry nearest to ``x`` is the number of boundaries below ``x``.

    Each is the midpoint of two neighbours, rounded down to fp32: ``x > boundary`` decides exactly, and a tie takes the
    lower entry.
    """
    values = dynamic_map(signed)
    return tuple(_down_to_fp32((a + b) / 2) for a, b in pairwise(values))


def dynamic_zero(signed: bool) -> int:
    """The index of 0 in the dynamic map."""
    return dynamic_map(signed).index(0.0)


assert math.isclose(DITHER_J / 2**32, (math.sqrt(5) - 1) / 2, rel_tol=1e-9)
assert math.isclose(WEIGHT_J / 2**32, math.sqrt(2) - 1, rel_tol=1e-9)
assert math.isclose(WEIGHT_STEP / 2**32, math.sqrt(3) - 1, rel_tol=1e-9)
