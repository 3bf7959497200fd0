"""Affine codes in plain PyTorch, for any device: what :func:`memkern.quantize_affine` runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..quant import codec as C
from ..quant.layout import FLOATS, BlockLayout, check_block_size, layout_of, memory_order, run_layout
from .blockwise import code_blocks, dither, from_blocks, pack_pairs, to_blocks, unpack_pairs


def limits(bits: int) -> tuple[int, int]:
    """The least and the largest code."""
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def finite_range(x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest finite valid value of each row; 0 where there is none."""
    usable = valid & x.isfinite()
    low = torch.where(usable, x, torch.inf).amin(1)
    high = torch.where(usable, x, -torch.inf).amax(1)
    none = ~usable.any(1)
    return torch.where(none, 0.0, low), torch.where(none, 0.0, high)


def parameters(a: Tensor, b: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale (fp32) and zero point (int32) of ranges [a, b].

    ``s = (b - a) / (b_q - a_q)``, ``z = round((b a_q - a b_q) / (b - a))``, computed as ``round(a_q - a / s)``, the
    same number. A range that is narrower than 2^-20 of its distance from zero is widened to that; where a = b = c
    the scale is |c| (1 if c is 0) and the code a_q stands for c itself.
    """
    low, high = limits(bits)
    size = torch.maximum(a.abs(), b.abs())
    # Halves: the difference of two large numbers of unlike sign would overflow. A tensor over a tensor: over a number
    # it would be a product with its reciprocal on a GPU.
    scale = (b / 2 - a / 2) / torch.full_like(a, (high - low) / 2)
    scale = torch.maximum(scale, size / C.AFFINE_FARTHEST)
    scale = torch.maximum(scale, torch.full_like(scale, torch.finfo(torch.float32).tiny))
    constant = a == b
    scale = torch.where(constant, torch.where(size > 0, size, 1.0), scale)
    zero_point = torch.where(constant, low - a.sign(), torch.round(low - a / scale))
    return scale, zero_point.to(torch.int32)


def encode(x: Tensor, scale: Tensor, zero_point: Tensor, bits: int, u: Tensor | None) -> Tensor:
    """``clip(round(x / s + z), a_q, b_q)`` as int8; with u ``floor(x / s + z + u)``. NaN becomes the code of 0."""
    low, high = limits(bits)
    z = zero_point.float()[:, None]
    q = x / scale[:, None] + z
    q = q.round() if u is None else (q + u).floor()
    q = torch.where(x.isnan(), z, q)
    return q.clamp(low, high).to(torch.int8)


def decode(codes: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """``s (x_q - z)``, fp32: the difference is exact for the zero points that there are."""
    return scale[:, None] * (codes.float() - zero_point.float()[:, None])


def offsets(x: Tensor, layout: BlockLayout, seed: int) -> Tensor:
    """u in [0, 1) of stochastic rounding, from an element's place in memory and the seed; in blocks."""
    u = torch.empty_like(x, dtype=torch.float32)
    memory_order(u).copy_(dither(x.numel(), seed % 2**32, x.device))
    return to_blocks(u, layout)


def to_halves(codes: Tensor) -> Tensor:
    """int8 codes of 4 bits in the order of memory, two in a byte, the first in the low half."""
    return pack_pairs(memory_order(codes))


def from_halves(halves: Tensor, numel: int) -> Tensor:
    return (unpack_pairs(halves, numel).to(torch.int8) ^ 8) - 8


def check_bits(bits: int) -> None:
    if bits not in (8, 4):
        raise ValueError(f"bits must be 8 or 4, got {bits}")


def _check_per_scale(name: str, given: Tensor, dtype: torch.dtype, layout: BlockLayout) -> None:
    if given.dtype != dtype or tuple(given.shape) != layout.scale_shape:
        raise ValueError(
            f"{name} must be {dtype} of shape {layout.scale_shape}, got {given.dtype} of shape {tuple(given.shape)}"
        )


def check_quantize(
    x: Tensor, low: Tensor | None, high: Tensor | None, bits: int, block_size: int | None
) -> BlockLayout:
    """The blocks, or runs, that have a scale each."""
    check_bits(bits)
    if x.dtype not in FLOATS:
        raise TypeError(f"x must be float32, bfloat16 or float16, got {x.dtype}")
    if bits == 4 and not x.is_contiguous():
        raise ValueError(f"x must be contiguous for bits=4, got strides {x.stride()}")
    if (low is None) != (high is None):
        raise ValueError("low and high must be given together")
    layout = _layout(x, block_size, low)
    for name, given in (("low", low), ("high", high)):
        if given is not None:
            _check_per_scale(name, given, torch.float32, layout)
    return layout


def check_dequantize(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    bits: int,
    block_size: int | None,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> tuple[BlockLayout, Tensor]:
    """The same, and an empty tensor for the values."""
    check_bits(bits)
    if dtype not in FLOATS:
        raise TypeError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
    if codes.dtype != (torch.int8 if bits == 8 else torch.uint8):
        raise TypeError(f"codes must be int8 for bits=8 and uint8 for bits=4, got {codes.dtype} for {bits}")
    size = torch.Size(shape)
    if bits == 8:
        if codes.shape != size:
            raise ValueError(f"shape must be that of codes, {tuple(codes.shape)}, got {tuple(size)}")
        values = torch.empty_like(codes, dtype=dtype)
    else:
        if codes.shape != ((size.numel() + 1) // 2,):
            raise ValueError(
                f"codes must have {(size.numel() + 1) // 2} bytes for {tuple(size)}, got {codes.shape}"
            )
        values = codes.new_empty(size, dtype=dtype)
    layout = _layout(codes if bits == 8 else values, block_size, scale)
    _check_per_scale("scale", scale, torch.float32, layout)
    _check_per_scale("zero_point", zero_point, torch.int32, layout)
    return layout, values


def _layout(x: Tensor, block_size: int | None, per_scale: Tensor | None) -> BlockLayout:
    if block_size is None:
        return run_layout(x, per_scale)
    check_block_size(block_size)
    return layout_of(x, block_size)


def quantize_affine(
    x: Tensor,
    low: Tensor | None,
    high: Tensor | None,
    bits: int,
    block_size: int | None,
    seed: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and zero_point of :func:`memkern.quantize_affine`.

    low, high: the ranges, fp32; None takes each block's own. Without ``block_size`` as many equal runs of memory as
    there are ranges share one each. seed: of stochastic rounding; None rounds to the nearest.
    """
    layout = check_quantize(x, low, high, bits, block_size)
    rows = to_blocks(x, layout)
    if low is None or high is None:
        low, high = finite_range(rows, to_blocks(torch.ones_like(x), layout) > 0)
    scale, zero_point = parameters(low.reshape(-1), high.reshape(-1), bits)
    u = None if seed is None else offsets(x, layout, seed)
    codes = torch.empty_like(x, dtype=torch.int8)
    from_blocks(encode(rows, scale, zero_point, bits, u), layout, codes)
    shape = layout.scale_shape
    return codes if bits == 8 else to_halves(codes), scale.reshape(shape), zero_point.reshape(shape)


def dequantize_affine(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    bits: int,
    block_size: int | None,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """The values of :func:`memkern.dequantize_affine`. shape: that of the values; codes of 4 bits do not show it."""
    layout, values = check_dequantize(codes, scale, zero_point, bits, block_size, shape, dtype)
    if bits == 4:
        codes = from_halves(codes, values.numel()).view(values.shape)
    blocks = decode(code_blocks(codes, layout), scale.reshape(-1), zero_point.reshape(-1))
    from_blocks(blocks, layout, values)
    return values
