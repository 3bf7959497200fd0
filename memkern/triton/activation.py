"""memkern::few_bit_encode, few_bit_forward, few_bit_backward and few_bit_backward_from_output.

A tile is (BLOCK / 8, 8) elements in memory order, so that a row's bits of one plane are one byte. Tables are
constexpr arguments: a kernel is compiled for each that a model uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quant.codec import ACTIVATIONS, EVEN, ODD, PLAIN, to_fp32
from ..reference.activation import (
    check_from_output,
    check_function,
    check_levels,
    check_table,
    check_values,
    plane_bytes,
)
from .launch import OPTIONS, TILE, cdiv, guard
from .tile import LINE, pointer

_PLAIN, _EVEN, _ODD = (tl.constexpr(number) for number in (PLAIN, EVEN, ODD))
_NO_FUNCTION = tl.constexpr(-1)
_JIT: dict[str, Any] = {
    "do_not_specialize": ["numel", "plane"],
    "do_not_specialize_on_alignment": ["x", "y", "grad", "output", "result", "codes"],
}

GELU = tl.constexpr(ACTIVATIONS["gelu"])
GELU_TANH = tl.constexpr(ACTIVATIONS["gelu_tanh"])
SILU = tl.constexpr(ACTIVATIONS["silu"])
TANH = tl.constexpr(ACTIVATIONS["tanh"])
SIGMOID = tl.constexpr(ACTIVATIONS["sigmoid"])
SOFTPLUS = tl.constexpr(ACTIVATIONS["softplus"])
MISH = tl.constexpr(ACTIVATIONS["mish"])
HARDSWISH = tl.constexpr(ACTIVATIONS["hardswish"])
QUICK_GELU = tl.constexpr(ACTIVATIONS["quick_gelu"])
RELU = tl.constexpr(ACTIVATIONS["relu"])
LEAKY_RELU = tl.constexpr(ACTIVATIONS["leaky_relu"])
HARDTANH = tl.constexpr(ACTIVATIONS["hardtanh"])

_INF = tl.constexpr(float("inf"))
_SIGN_BIT = tl.constexpr(-(2**31))
_TO_INT = tl.constexpr(1.5 * 2**23)  # x + _TO_INT - _TO_INT is x rounded to an integer


# ---- activations of one element in fp32. Mirror: ``activate`` in csrc/cuda/activation.cu.
#
# Triton's own exp is ``ex2.approx`` of a product, whose error grows to |x| ulp, and its tanh and log1p are in NVIDIA's
# libdevice only. Those here are within two or three ulp on every device and in the interpreter. Polynomials are minimax
# in relative error.


@triton.jit
def exp(x):
    """2^n exp(r), r = x - n log 2; 2^n as a product of two powers, because 2^128 overflows."""
    n = tl.math.fma(x, 1.4426950408889634, _TO_INT) - _TO_INT
    r = tl.math.fma(n, -0.693145751953125, x)
    r = tl.math.fma(n, -1.428606765330187e-06, r)
    half = (n * 0.5 + _TO_INT) - _TO_INT
    y = tl.math.exp2(r * 1.4426950408889634) * tl.math.exp2(half) * tl.math.exp2(n - half)
    y = tl.where(x > 88.8, _INF, y)
    return tl.where(x < -104.0, 0.0, y)


@triton.jit
def tanh(x):
    a = tl.abs(x)
    s = x * x
    p = tl.math.fma(s, -0.00656509, 0.0212852)
    p = tl.math.fma(s, p, -0.05390547)
    p = tl.math.fma(s, p, 0.13333094)
    p = tl.math.fma(s, p, -0.33333332)
    small = tl.math.fma(x * s, p, x)
    large = 1.0 - tl.math.div_rn(2.0, exp(2.0 * a) + 1.0)
    large = tl.where(x < 0, -large, large)
    return tl.where(a < 0.55, small, large)


@triton.jit
def log1p_to_one(w):
    """log(1 + w) for 0 <= w <= 1: 2 artanh(w / (2 + w))."""
    q = tl.math.div_rn(w, 2.0 + w)
    s = q * q
    p = tl.math.fma(s, 0.11598529, 0.10856814)
    p = tl.math.fma(s, p, 0.14295873)
    p = tl.math.fma(s, p, 0.19999863)
    p = tl.math.fma(s, p, 0.33333334)
    twice = q + q
    return tl.math.fma(twice * s, p, twice)


@triton.jit
def sigmoid(x):
    return tl.math.div_rn(1.0, 1.0 + exp(-x))


@triton.jit
def activate(x, A: tl.constexpr, B: tl.constexpr, FN: tl.constexpr):
    """A, B: softplus' beta and threshold, leaky ReLU's slope, hardtanh's bounds."""
    if FN == GELU:
        y = x * 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif FN == GELU_TANH:
        inner = 0.7978845608028654 * tl.math.fma(x * x * x, 0.044715, x)
        y = 0.5 * x * (1.0 + tanh(inner))
    elif FN == SILU:
        y = tl.math.div_rn(x, 1.0 + exp(-x))
    elif FN == TANH:
        y = tanh(x)
    elif FN == SIGMOID:
        y = sigmoid(x)
    elif FN == SOFTPLUS:
        scaled = x * A
        soft = tl.maximum(scaled, 0.0) + log1p_to_one(exp(-tl.abs(scaled)))
        y = tl.where(scaled > B, x, tl.math.div_rn(soft, A))
        y = tl.where(x == x, y, x)
    elif FN == MISH:
        e = exp(x)
        n = e * (e + 2.0)  # tanh(log(1 + e)) = n / (n + 2)
        y = tl.where(x > 20.0, x, x * tl.math.div_rn(n, n + 2.0))
    elif FN == HARDSWISH:
        y = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) * 0.16666667
        y = tl.where(x == x, y, x)
    elif FN == QUICK_GELU:
        y = x * sigmoid(1.702 * x)
    elif FN == RELU:
        y = tl.where(x < 0, 0.0, x)
    elif FN == LEAKY_RELU:
        y = tl.where(x > 0, x, x * A)
    else:
        y = tl.where(x < A, A, tl.where(x > B, B, x))
    return y


# Coefficients of a, a^2, ... of log2(1 - erf(a / sqrt(2))), and of that with GELU_TANH's tanh instead of erf.
_GELU_LOG = tl.constexpr(
    (-1.15089750289917, -0.4601901173591614, -0.051279813051223755, 0.006769770756363869, -0.00042125486652366817)
)  # fmt: skip
_GELU_TANH_LOG = tl.constexpr(
    (-1.151023030281067, -0.4596197307109833, -0.05010935664176941, 0.004704978317022324, 0.0033134908881038427,
     -0.002342691645026207, 0.00043774291407316923, -2.7559090085560456e-05)
)  # fmt: skip


@triton.jit
def gelu_of_bf16(x, LOG: tl.constexpr, COUNT: tl.constexpr):
    """GELU of bf16 values in fp32: rounded to bf16 it is what :func:`activate` gives, for each of the 65,536.

    1 - erf is a power of two, whose exponent is a short polynomial: its coefficients were fitted to the intervals in
    which results are rounded alike, with CUDA 13's erf (docs/numerics.md), and two ulp more or less of the power change
    no result. That is 28 instructions per element on sm_90 instead of 53, codes included. Of fp16 about 150 results
    would change even with the exact exponent, left of -2.5, where 1 + erf cancels: it keeps the formula.
    """
    a = tl.abs(x)
    log = tl.math.fma(a, LOG[COUNT - 1], LOG[COUNT - 2])
    for i in tl.static_range(3, COUNT + 1):
        log = tl.math.fma(a, log, LOG[COUNT - i])
    half = 0.5 * x
    y = tl.math.fma(tl.abs(half), 1.0 - tl.math.exp2(log * a), half)
    # The sum of -x / 2 and x / 2 is 0, where -0 is expected.
    sign = x.to(tl.int32, bitcast=True) & _SIGN_BIT
    return (y.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


# ---- kernels


@triton.jit
def _program_tile(numel, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """This program's tile: its first element, its elements' offsets from there, and how many of them there are."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    left = tl.minimum(numel - start, BLOCK).to(tl.int32)
    if VECTOR > 1:
        left = tl.multiple_of(left, VECTOR)
    offset = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    return start, offset, left


@triton.jit
def _plane_bytes(start, plane, BLOCK: tl.constexpr):
    """The offsets of the tile's bytes in a plane, and their mask."""
    byte = start // 8 + tl.arange(0, BLOCK // 8)
    return byte, byte < plane


@triton.jit
def _elements_of_bytes(left, BLOCK: tl.constexpr):
    """Of each of the tile's bytes the bits of elements before ``left``, in all four planes."""
    n = tl.minimum(tl.maximum(left - 8 * tl.arange(0, BLOCK // 8), 0), 8)
    return ((1 << n) - 1).to(tl.uint32) * 0x01010101


@triton.jit(**_JIT)
def encode_vectors(
    x, y, codes, numel, plane,
    A: tl.constexpr, B: tl.constexpr, FN: tl.constexpr,
    THRESHOLDS: tl.constexpr, FLIPS: tl.constexpr, COUNT: tl.constexpr, SYMMETRY: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Codes of x, and its activation unless FN is -1."""
    start, offset, left = _program_tile(numel, BLOCK, VECTOR)
    mask = offset < left
    x = pointer(x, start, x.dtype.element_ty, VECTOR)
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    u = value
    if SYMMETRY != _PLAIN:
        u = tl.abs(value)
    bits = tl.zeros(value.shape, tl.uint32)
    for p in tl.static_range(BITS):
        bit = value < 0 if SYMMETRY == _ODD and p == BITS - 1 else tl.zeros(value.shape, tl.int1)
        for i in tl.static_range(COUNT):
            if FLIPS[i] >> p & 1:
                bit = bit ^ (u > THRESHOLDS[i])
        bits |= tl.where(bit, 1 << (8 * p), 0).to(tl.uint32)
    planes = tl.sum(bits << tl.arange(0, 8).to(tl.uint32)[None, :], axis=1) & _elements_of_bytes(left, BLOCK)
    byte, byte_mask = _plane_bytes(start, plane, BLOCK)
    for p in tl.static_range(BITS):
        tl.store(
            codes + p * plane.to(tl.int64) + byte, (planes >> (8 * p) & 255).to(tl.uint8), mask=byte_mask
        )
    if FN != _NO_FUNCTION:
        y = pointer(y, start, y.dtype.element_ty, VECTOR)
        if x.dtype.element_ty == tl.bfloat16 and FN == GELU:
            result = gelu_of_bf16(value, _GELU_LOG, 5)
        elif x.dtype.element_ty == tl.bfloat16 and FN == GELU_TANH:
            result = gelu_of_bf16(value, _GELU_TANH_LOG, 8)
        else:
            result = activate(value, A, B, FN)
        tl.store(y + offset, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _load_planes(codes, start, plane, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The tile's codes, a word each: bit p of the code is bit 8 p of the word."""
    byte, byte_mask = _plane_bytes(start, plane, BLOCK)
    planes = tl.zeros((BLOCK // 8,), tl.uint32)
    for p in tl.static_range(BITS):
        planes |= tl.load(codes + p * plane.to(tl.int64) + byte, mask=byte_mask, other=0).to(tl.uint32) << (
            8 * p
        )
    return (planes[:, None] >> tl.arange(0, 8).to(tl.uint32)[None, :]) & 0x01010101


@triton.jit
def _select_of_2(bits, LEVELS: tl.constexpr, I: tl.constexpr):  # noqa: E741
    return tl.where((bits & 1) != 0, LEVELS[2 * I + 1], LEVELS[2 * I])


@triton.jit
def _select_of_4(bits, LEVELS: tl.constexpr, I: tl.constexpr):  # noqa: E741
    return tl.where(
        (bits & 256) != 0, _select_of_2(bits, LEVELS, 2 * I + 1), _select_of_2(bits, LEVELS, 2 * I)
    )


@triton.jit
def _select_of_8(bits, LEVELS: tl.constexpr, I: tl.constexpr):  # noqa: E741
    return tl.where(
        (bits & 65536) != 0, _select_of_4(bits, LEVELS, 2 * I + 1), _select_of_4(bits, LEVELS, 2 * I)
    )


@triton.jit
def level_of(bits, LEVELS: tl.constexpr, BITS: tl.constexpr):
    """LEVELS[code], by one select per bit."""
    if BITS == 1:
        level = _select_of_2(bits, LEVELS, 0)
    elif BITS == 2:
        level = _select_of_4(bits, LEVELS, 0)
    elif BITS == 3:
        level = _select_of_8(bits, LEVELS, 0)
    else:
        level = tl.where((bits >> 24) != 0, _select_of_8(bits, LEVELS, 1), _select_of_8(bits, LEVELS, 0))
    return level


@triton.jit(**_JIT)
def multiply_by_levels(
    grad, result, codes, numel, plane,
    LEVELS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    start, offset, left = _program_tile(numel, BLOCK, VECTOR)
    mask = offset < left
    grad = pointer(grad, start, grad.dtype.element_ty, VECTOR)
    result = pointer(result, start, result.dtype.element_ty, VECTOR)
    g = tl.load(grad + offset, mask=mask, other=0.0).to(tl.float32)
    level = level_of(_load_planes(codes, start, plane, BITS, BLOCK), LEVELS, BITS)
    tl.store(result + offset, (g * level).to(result.dtype.element_ty), mask=mask)


@triton.jit(**_JIT)
def multiply_by_two_branch(
    grad, output, result, codes, numel, plane,
    MINIMUM: tl.constexpr, FALLING: tl.constexpr, RISING: tl.constexpr, REACH: tl.constexpr, SCALE: tl.constexpr,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """REACH, SCALE: of the falling and the rising side, SCALE = 2 / REACH."""
    start, offset, left = _program_tile(numel, BLOCK, VECTOR)
    mask = offset < left
    grad = pointer(grad, start, grad.dtype.element_ty, VECTOR)
    result = pointer(result, start, result.dtype.element_ty, VECTOR)
    g = tl.load(grad + offset, mask=mask, other=0.0).to(tl.float32)
    output = pointer(output, start, output.dtype.element_ty, VECTOR)
    y = tl.load(output + offset, mask=mask, other=0.0).to(tl.float32)
    rising = _load_planes(codes, start, plane, 1, BLOCK) != 0
    t = y - MINIMUM
    s = tl.math.sqrt_rn(tl.where(t > 0, t, 0.0))
    reach = tl.where(rising, REACH[1], REACH[0])
    z = tl.minimum(s, reach) * tl.where(rising, SCALE[1], SCALE[0]) - 1.0
    d = tl.where(rising, RISING[0], FALLING[0])
    for i in tl.static_range(1, COUNT):
        d = d * z + tl.where(rising, RISING[i], FALLING[i])
    tl.store(result + offset, (g * d).to(result.dtype.element_ty), mask=mask)


def _fp32(numbers: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(to_fp32, numbers))


def _launch(kernel: Any, codes: Tensor, *floats: Tensor, **constants: Any) -> None:
    """Launches a kernel over floating-point tensors of the same strides."""
    numel, plane, device = floats[0].numel(), codes.shape[1], codes.device
    # 16 bytes of the tensor with the widest elements; the same number of elements of the others.
    aligned = numel % LINE == 0 and not any(t.data_ptr() % 16 for t in floats)
    vector = 16 // max(t.element_size() for t in floats) if aligned else 1
    if numel:
        with guard(device):
            kernel[(cdiv(8 * plane, TILE),)](
                *floats, codes, numel, plane, **constants, BLOCK=TILE, VECTOR=vector, **OPTIONS
            )


def _encode(
    x: Tensor, y: Tensor, constants: dict[str, Any], bits: int, thresholds: Any, flips: Any, symmetry: int
) -> Tensor:
    check_table(bits, thresholds, flips, symmetry)
    check_values(x, "x")
    codes = x.new_empty((bits, plane_bytes(x.numel())), dtype=torch.uint8)
    _launch(
        encode_vectors, codes, x, y,
        THRESHOLDS=_fp32(thresholds), FLIPS=tuple(flips), COUNT=len(flips), SYMMETRY=symmetry, BITS=bits, **constants,
    )  # fmt: skip
    return codes


def few_bit_encode(
    x: Tensor, bits: int, thresholds: Sequence[float], flips: Sequence[int], symmetry: int
) -> Tensor:
    """The codes of a dense tensor."""
    return _encode(x, x, {"A": 0.0, "B": 0.0, "FN": -1}, bits, thresholds, flips, symmetry)


def few_bit_forward(
    x: Tensor,
    fn: int,
    a: float,
    b: float,
    bits: int,
    thresholds: Sequence[float],
    flips: Sequence[int],
    symmetry: int,
) -> tuple[Tensor, Tensor]:
    """The activation of a dense tensor, and its codes."""
    check_function(fn)
    y = torch.empty_like(x)
    constants = {"A": to_fp32(a), "B": to_fp32(b), "FN": fn}
    return y, _encode(x, y, constants, bits, thresholds, flips, symmetry)


def few_bit_backward(grad: Tensor, codes: Tensor, levels: Sequence[float]) -> Tensor:
    """grad times its element's level."""
    check_levels(grad, codes, levels)
    result = torch.empty_like(grad)
    _launch(multiply_by_levels, codes, grad, result, LEVELS=_fp32(levels), BITS=codes.shape[0])
    return result


def few_bit_backward_from_output(
    grad: Tensor,
    output: Tensor,
    codes: Tensor,
    minimum: float,
    falling: Sequence[float],
    rising: Sequence[float],
    falling_reach: float,
    rising_reach: float,
) -> Tensor:
    """grad times the derivative, computed from the output and one bit."""
    check_from_output(grad, output, codes, falling, rising)
    result = torch.empty_like(grad)
    reach = (falling_reach, rising_reach)
    _launch(
        multiply_by_two_branch, codes, grad, output, result,
        MINIMUM=to_fp32(minimum), FALLING=_fp32(falling), RISING=_fp32(rising), REACH=_fp32(reach),
        SCALE=_fp32([2 / each for each in reach]), COUNT=len(rising),
    )  # fmt: skip
    return result
