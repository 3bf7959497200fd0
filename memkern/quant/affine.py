"""Affine quantization: integers with a scale and a zero point, per block, channel or tensor.

In torch's operations, on any device: there are no kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..reference.blockwise import from_blocks, to_blocks
from .layout import FLOATS, BlockLayout, check_block_size, layout_of

GRANULARITIES = ("block", "channel", "tensor")
FARTHEST = 2**20
"""No zero point is further from zero than about so many steps: beyond, fp32 could not tell codes apart."""


def _check(name: str, given: Any, allowed: Sequence[Any]) -> None:
    if isinstance(given, bool) or given not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {given!r}")


def _layout(x: Tensor, granularity: str, block_size: int) -> BlockLayout:
    """The runs of memory that share a scale, as blocks."""
    layout = layout_of(x, block_size)  # raises unless dense
    numel = x.numel()
    if granularity == "block" or numel == 0:
        return layout
    if granularity == "tensor" or x.dim() == 0:
        return BlockLayout(numel, numel, numel, ())
    if not x.is_contiguous():
        raise ValueError(f"granularity='channel' needs a contiguous tensor, got strides {x.stride()}")
    run = numel // x.shape[0]
    return BlockLayout(numel, run, run, (x.shape[0],))


def _limits(bits: int) -> tuple[int, int]:
    """The least and the largest code."""
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def _finite_range(rows: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest finite valid value of each row; 0 where there is none."""
    usable = valid & rows.isfinite()
    low = torch.where(usable, rows, torch.inf).amin(1)
    high = torch.where(usable, rows, -torch.inf).amax(1)
    is_empty = ~usable.any(1)
    return torch.where(is_empty, 0.0, low), torch.where(is_empty, 0.0, high)


def _scale_and_zero_point(a: Tensor, b: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The scales (fp32) and zero points (int32) of ranges [a, b], by docs/numerics.md; z is ``round(a_q - a / s)``."""
    low, high = _limits(bits)
    magnitude = torch.maximum(a.abs(), b.abs())
    # Halves: the difference of two large numbers of unlike sign would overflow. A tensor over a tensor: over a number
    # it would be a product with its reciprocal on a GPU.
    scale = (b / 2 - a / 2) / torch.full_like(a, (high - low) / 2)
    scale = torch.maximum(scale, magnitude / FARTHEST)
    scale = torch.maximum(scale, torch.full_like(scale, torch.finfo(torch.float32).tiny))
    is_constant = a == b
    scale = torch.where(is_constant, torch.where(magnitude > 0, magnitude, 1.0), scale)
    zero_point = torch.where(is_constant, low - a.sign(), torch.round(low - a / scale))
    return scale, zero_point.to(torch.int32)


@torch.no_grad()
def quantize_affine(
    x: Tensor, *, bits: int = 8, granularity: str = "block", block_size: int = 128
) -> tuple[Tensor, Tensor, Tensor]:
    """Stores a tensor as integers of 8 or 4 bits: ``x_q = clip(round(x / s + z), a_q, b_q)``, ``x = s (x_q - z)``.

    With the range [a, b] of the finite values and [a_q, b_q] of the codes, -128 to 127 or -8 to 7:
    ``s = (b - a) / (b_q - a_q)`` and ``z = round((b a_q - a b_q) / (b - a))``. It suits bounded values; values with
    heavy tails, and log-probabilities, lose less in the codes of :func:`memkern.quantize_blockwise`.

    Args:
        x: float32, bfloat16 or float16, any shape, dense in memory.
        bits: 8 or 4. Codes of 4 bits are not packed.
        granularity: what shares a scale: ``"block"``, as :func:`memkern.quantize_blockwise` cuts; ``"channel"``, an
            index of the first dimension; ``"tensor"``.
        block_size: elements per block, a multiple of 8 from 8 to 4096.

    Returns:
        codes: int8 of x's shape and strides.
        scale: float32, (rows, blocks per row), (channels,) or ().
        zero_point: int32, the same shape.

    A range far from zero gets steps of at least 2^-20 of its distance, so that z fits and codes stay apart; a constant
    row comes back exactly. NaN is stored as the code of 0, infinities as the ends of the range.

    Raises:
        ValueError: an option that is not allowed, or a tensor that is not dense.
        TypeError: a dtype that is not supported.
    """
    _check("bits", bits, (8, 4))
    _check("granularity", granularity, GRANULARITIES)
    check_block_size(block_size)
    if x.dtype not in FLOATS:
        raise TypeError(f"x must be float32, bfloat16 or float16, got {x.dtype}")
    if x.layout != torch.strided:
        raise ValueError(f"x must be a dense tensor, got layout {x.layout}")
    x = x.detach()
    layout = _layout(x, granularity, block_size)
    rows = to_blocks(x, layout)
    scale, zero_point = _scale_and_zero_point(*_finite_range(rows, to_blocks(torch.ones_like(x), layout) > 0), bits)
    z = zero_point.float()[:, None]
    q = torch.where(rows.isnan(), z, (rows / scale[:, None] + z).round()).clamp(*_limits(bits))
    codes = torch.empty_like(x, dtype=torch.int8)
    from_blocks(q.to(torch.int8), layout, codes)
    return codes, scale.view(layout.scale_shape), zero_point.view(layout.scale_shape)


@torch.no_grad()
def dequantize_affine(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    *,
    granularity: str = "block",
    block_size: int = 128,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The values that :func:`quantize_affine` stored: ``s (x_q - z)``.

    Args:
        codes, scale, zero_point: as returned by :func:`quantize_affine`, with the same granularity and block_size.
        dtype: of the result: float32, bfloat16 or float16.

    Raises:
        ValueError: an option that is not allowed, or a scale that does not fit the codes.
        TypeError: a dtype that is not supported.
    """
    _check("granularity", granularity, GRANULARITIES)
    check_block_size(block_size)
    if dtype not in FLOATS:
        raise TypeError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
    if codes.dtype != torch.int8:
        raise TypeError(f"codes must be torch.int8, got {codes.dtype}")
    layout = _layout(codes, granularity, block_size)
    for name, tensor, expected in (("scale", scale, torch.float32), ("zero_point", zero_point, torch.int32)):
        if tensor.dtype != expected:
            raise TypeError(f"{name} must be {str(expected).removeprefix('torch.')}, got {tensor.dtype}")
        if tuple(tensor.shape) != layout.scale_shape:
            raise ValueError(f"{name} must have shape {layout.scale_shape}, got {tuple(tensor.shape)}")
    # The difference is exact for the zero points that there are.
    steps = to_blocks(codes, layout) - zero_point.reshape(-1, 1).float()
    values = torch.empty_like(codes, dtype=dtype)
    from_blocks(scale.reshape(-1, 1) * steps, layout, values)
    return values
