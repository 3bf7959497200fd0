"""Kernels of memkern::few_bit_encode, few_bit_forward, few_bit_backward and few_bit_backward_from_output.

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

from ..quant.codec import ODD, PLAIN, plane_bytes, to_fp32
from ..reference.activation import (
    check_from_output,
    check_function,
    check_levels,
    check_table,
    check_values,
)
from .activation_formulas import GELU, GELU_LOG, GELU_TANH, GELU_TANH_LOG, activate, gelu_of_bf16
from .launch import OPTIONS, TILE, address_of, cdiv, guard
from .tile import LINE, pointer

_PLAIN, _ODD = tl.constexpr(PLAIN), tl.constexpr(ODD)
_NO_FUNCTION = tl.constexpr(-1)
_JIT: dict[str, Any] = {
    "do_not_specialize": ["numel", "plane"],
    "do_not_specialize_on_alignment": ["x", "y", "grad", "output", "result", "codes"],
}


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
    """A mask for each of the tile's bytes: the bits of elements before ``left``, in all four planes."""
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
        tl.store(codes + p * plane.to(tl.int64) + byte, (planes >> (8 * p) & 255).to(tl.uint8), mask=byte_mask)
    if FN != _NO_FUNCTION:
        y = pointer(y, start, y.dtype.element_ty, VECTOR)
        if x.dtype.element_ty == tl.bfloat16 and FN == GELU:
            result = gelu_of_bf16(value, GELU_LOG, 5)
        elif x.dtype.element_ty == tl.bfloat16 and FN == GELU_TANH:
            result = gelu_of_bf16(value, GELU_TANH_LOG, 8)
        else:
            result = activate(value, A, B, FN)
        tl.store(y + offset, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _load_planes(codes, start, plane, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The tile's codes, a word each: bit p of the code is bit 8 p of the word."""
    byte, byte_mask = _plane_bytes(start, plane, BLOCK)
    planes = tl.zeros((BLOCK // 8,), tl.uint32)
    for p in tl.static_range(BITS):
        planes |= tl.load(codes + p * plane.to(tl.int64) + byte, mask=byte_mask, other=0).to(tl.uint32) << (8 * p)
    return (planes[:, None] >> tl.arange(0, 8).to(tl.uint32)[None, :]) & 0x01010101


@triton.jit
def _select_of_2(bits, LEVELS: tl.constexpr, I: tl.constexpr):  # noqa: E741
    """LEVELS[2 I] or the next, by the code's bit 0; the functions below choose by bit 1 and bit 2 too."""
    return tl.where((bits & 1) != 0, LEVELS[2 * I + 1], LEVELS[2 * I])


@triton.jit
def _select_of_4(bits, LEVELS: tl.constexpr, I: tl.constexpr):  # noqa: E741
    return tl.where((bits & 256) != 0, _select_of_2(bits, LEVELS, 2 * I + 1), _select_of_2(bits, LEVELS, 2 * I))


@triton.jit
def _select_of_8(bits, LEVELS: tl.constexpr, I: tl.constexpr):  # noqa: E741
    return tl.where((bits & 65536) != 0, _select_of_4(bits, LEVELS, 2 * I + 1), _select_of_4(bits, LEVELS, 2 * I))


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
    """result = grad times the level of each element's code."""
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
    """result = grad times the derivative from output. REACH, SCALE = 2 / REACH: of the falling and the rising side."""
    start, offset, left = _program_tile(numel, BLOCK, VECTOR)
    mask = offset < left
    grad = pointer(grad, start, grad.dtype.element_ty, VECTOR)
    result = pointer(result, start, result.dtype.element_ty, VECTOR)
    g = tl.load(grad + offset, mask=mask, other=0.0).to(tl.float32)
    output = pointer(output, start, output.dtype.element_ty, VECTOR)
    y = tl.load(output + offset, mask=mask, other=0.0).to(tl.float32)
    rising = _load_planes(codes, start, plane, 1, BLOCK) != 0
    above = y - MINIMUM
    root = tl.math.sqrt_rn(tl.where(above > 0, above, 0.0))
    reach = tl.where(rising, REACH[1], REACH[0])
    z = tl.minimum(root, reach) * tl.where(rising, SCALE[1], SCALE[0]) - 1.0
    derivative = tl.where(rising, RISING[0], FALLING[0])
    for i in tl.static_range(1, COUNT):
        derivative = derivative * z + tl.where(rising, RISING[i], FALLING[i])
    tl.store(result + offset, (g * derivative).to(result.dtype.element_ty), mask=mask)


def _fp32(numbers: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(to_fp32, numbers))


def _launch(kernel: Any, codes: Tensor, named: dict[str, Tensor], **constants: Any) -> None:
    """Launches a kernel over floating-point tensors of the same strides, which ``named`` has by name."""
    floats = [*named.values()]
    numel, plane, device = floats[0].numel(), codes.shape[1], codes.device
    address_of(codes, "codes")
    # 16 bytes of the tensor with the widest elements; the same number of elements of the others.
    aligned = not any([numel % LINE, *(address_of(x, name) % 16 for name, x in named.items())])
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
        encode_vectors, codes, {"x": x, "y": y},
        THRESHOLDS=_fp32(thresholds), FLIPS=tuple(flips), COUNT=len(flips), SYMMETRY=symmetry, BITS=bits, **constants,
    )  # fmt: skip
    return codes


def few_bit_encode(x: Tensor, bits: int, thresholds: Sequence[float], flips: Sequence[int], symmetry: int) -> Tensor:
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
    _launch(multiply_by_levels, codes, {"grad": grad, "result": result}, LEVELS=_fp32(levels), BITS=codes.shape[0])
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
        multiply_by_two_branch, codes, {"grad": grad, "output": output, "result": result},
        MINIMUM=to_fp32(minimum), FALLING=_fp32(falling), RISING=_fp32(rising), REACH=_fp32(reach),
        SCALE=_fp32([2 / r for r in reach]), COUNT=len(rising),
    )  # fmt: skip
    return result
