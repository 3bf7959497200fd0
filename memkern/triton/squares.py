"""Sums of squares in fp64. On devices with slow fp64 the squares of four elements are first added in fp32.

That takes a conversion and an addition in fp64 for four elements, in place of a conversion, a product and an
addition for each: a sixth. A product and two additions in fp32 are off by at most 3 * 2^-24, so a norm by
1.5 * 2^-24 = 9e-8.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

# Bits of 2^-50 and 2^60. Where a tile's largest magnitude is between them no sum of four squares overflows in fp32,
# and what its squares lose to underflow is at most 2^-40 of the sum of 1024 elements.
_MIN_BITS = tl.constexpr((127 - 50) << 23)
_MAX_BITS = tl.constexpr((127 + 60) << 23)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # magnitudes are in the order of these bits, infinity and NaN last
_PER_THREAD = tl.constexpr(8)  # elements of a tile, see launch.TILE


def is_slow(major: int, minor: int) -> bool:
    """Whether GPUs of a compute capability run fp64 at 1/64 of fp32's rate, not 1/2. As in csrc/cuda/device.cuh."""
    return (major, minor) not in ((7, 0), (8, 0), (9, 0), (10, 0))


@functools.cache
def slow_fp64(device: torch.device) -> bool:
    """SLOW_FP64 of the kernels on a device. AMD's gfx90a and gfx942 have half the rate of fp32, or all of it."""
    on_cuda = device.type == "cuda" and not torch.version.hip
    return on_cuda and is_slow(*torch.cuda.get_device_capability(device))


@triton.jit
def zero_squares(ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, VECTOR: tl.constexpr, SLOW_FP64: tl.constexpr):
    """The accumulator to which :func:`add_squares` adds tiles of (ROWS, BLOCK_SIZE).

    SLOW_FP64: a sum for every four elements, ``distance`` apart. A thread has loaded all four: with VECTOR they are
    neighbours, else a thread's elements are a tile's threads apart.
    """
    if SLOW_FP64:
        distance: tl.constexpr = 1 if VECTOR > 1 else ROWS * BLOCK_SIZE // _PER_THREAD
        return tl.zeros((ROWS * BLOCK_SIZE // (4 * distance), distance), tl.float64)
    else:
        return tl.zeros((ROWS, BLOCK_SIZE), tl.float64)


@triton.jit
def _sums_of_four(x, COUNT: tl.constexpr, DISTANCE: tl.constexpr):
    """(COUNT, DISTANCE) sums of four elements of a tile each, (a + c) + (b + d)."""
    pairs = tl.sum(tl.reshape(x, (COUNT, 2, 2 * DISTANCE)), axis=1)
    return tl.sum(tl.reshape(pairs, (COUNT, 2, DISTANCE)), axis=1)


@triton.jit
def add_squares(total, x, SLOW_FP64: tl.constexpr):
    """``total`` (:func:`zero_squares`) and the squares of a tile of fp32 values."""
    if SLOW_FP64:
        count: tl.constexpr = total.shape[0]
        distance: tl.constexpr = total.shape[1]
        largest = tl.max(x.to(tl.int32, bitcast=True) & _MAGNITUDE)
        if (largest == 0) | ((largest >= _MIN_BITS) & (largest <= _MAX_BITS)):
            total += _sums_of_four(x * x, count, distance).to(tl.float64)
        else:
            wide = x.to(tl.float64)
            total += _sums_of_four(wide * wide, count, distance)
        return total
    else:
        wide = x.to(tl.float64)
        return total + wide * wide
