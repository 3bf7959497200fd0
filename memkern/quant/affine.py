"""Affine quantization: integers with a scale and a zero point, per block, channel or tensor. In torch's operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..options import ROUNDINGS
from ..reference import affine as reference
from .layout import FLOATS, check_block_size, layout_of, memory_order

GRANULARITIES = ("block", "channel", "tensor")


def _check(name: str, given: Any, allowed: Sequence[Any]) -> None:
    if isinstance(given, bool) or given not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {given!r}")


def _scales(x: Tensor, granularity: str, block_size: int) -> tuple[int | None, tuple[int, ...]]:
    """The block_size of the reference (None: runs of memory share a scale), and the shape of the scales."""
    layout = layout_of(x, block_size)  # raises unless dense
    if granularity == "block" or x.numel() == 0:
        return block_size, layout.scale_shape
    if granularity == "tensor" or x.dim() == 0:
        return None, ()
    if not x.is_contiguous():
        raise ValueError(f"granularity='channel' needs a contiguous tensor, got strides {x.stride()}")
    return None, (x.shape[0],)


def _fixed_range(given: Any) -> tuple[float, float]:
    try:
        low, high = (float(end) for end in given)
    except (TypeError, ValueError):
        raise ValueError(f"range must be None or a pair of numbers, got {given!r}") from None
    if not -3.4e38 < low <= high < 3.4e38:
        raise ValueError(f"range must be finite numbers, the smaller one first, got {given!r}")
    return low, high


def _finite_range(x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The least and the largest finite value of each of so many equal runs of memory; 0 where there is none."""
    runs = memory_order(x).view(math.prod(shape), -1)
    low, high = runs.amin(1), runs.amax(1)
    # On the CPU an answer costs nothing; elsewhere it would wait for the device.
    ask = type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()
    if ask and low.isfinite().all() and high.isfinite().all():
        return low.float().view(shape), high.float().view(shape)
    low = runs.nan_to_num(torch.inf, torch.inf, torch.inf).amin(1)
    high = runs.nan_to_num(-torch.inf, -torch.inf, -torch.inf).amax(1)
    none = low == torch.inf
    return torch.where(none, 0.0, low).float().view(shape), torch.where(none, 0.0, high).float().view(shape)


@torch.no_grad()
def quantize_affine(
    x: Tensor,
    *,
    bits: int = 8,
    granularity: str = "block",
    range: tuple[float, float] | None = None,
    rounding: str = "nearest",
    seed: int = 0,
    block_size: int = 128,
) -> tuple[Tensor, Tensor, Tensor]:
    """Stores a tensor as integers of 8 or 4 bits: ``x_q = clip(round(x / s + z), a_q, b_q)``, ``x = s (x_q - z)``.

    With the range [a, b] of the values and [a_q, b_q] of the codes, -128 to 127 or -8 to 7:
    ``s = (b - a) / (b_q - a_q)`` and ``z = round((b a_q - a b_q) / (b - a))``. It suits bounded values and
    log-probabilities; values with heavy tails lose less in the codes of :func:`memkern.quantize_blockwise`.

    Args:
        x: float32, bfloat16 or float16, any shape, dense in memory.
        bits: 8 or 4.
        granularity: what shares a scale: ``"block"``, as :func:`memkern.quantize_blockwise` cuts; ``"channel"``, an
            index of the first dimension; ``"tensor"``.
        range: (a, b); values outside are clipped. None takes each row's own least and largest finite value.
        rounding: ``"nearest"`` (to even), or ``"stochastic"``: up with the probability of the remainder, without bias,
            from a hash of the element's place and ``seed``.
        block_size: elements per block, a multiple of 8 from 8 to 4096.

    Returns:
        codes: int8 of x's shape and strides; of 4 bits uint8 of shape ((numel + 1) // 2,), two in a byte in the order
            of a contiguous tensor, the first in the low half.
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
    _check("rounding", rounding, ROUNDINGS)
    check_block_size(block_size)
    if x.dtype not in FLOATS:
        raise TypeError(f"x must be float32, bfloat16 or float16, got {x.dtype}")
    if x.layout != torch.strided:
        raise ValueError(f"x must be a dense tensor, got layout {x.layout}")
    x = x.detach() if bits == 8 else x.detach().contiguous()
    size, shape = _scales(x, granularity, block_size)
    low: Tensor | None = None
    high: Tensor | None = None
    if range is not None:
        low, high = (x.new_full(shape, end, dtype=torch.float32) for end in _fixed_range(range))
    elif size is None:
        low, high = _finite_range(x, shape)
    return reference.quantize_affine(
        x, low, high, bits, size, None if rounding == "nearest" else int(seed) % 2**32
    )


@torch.no_grad()
def dequantize_affine(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    *,
    bits: int = 8,
    granularity: str = "block",
    shape: Sequence[int] | None = None,
    block_size: int = 128,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The values that :func:`quantize_affine` stored: ``s (x_q - z)``.

    Args:
        codes, scale, zero_point: as returned by :func:`quantize_affine`, with the same bits, granularity, block_size.
        shape: of the tensor, needed for 4 bits, whose codes do not show it; the result is contiguous.
        dtype: of the result: float32, bfloat16 or float16.

    Raises:
        ValueError: an option that is not allowed, a missing shape, or a scale that does not fit the codes.
        TypeError: a dtype that is not supported.
    """
    _check("bits", bits, (8, 4))
    _check("granularity", granularity, GRANULARITIES)
    check_block_size(block_size)
    if dtype not in FLOATS:
        raise TypeError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
    wanted = torch.int8 if bits == 8 else torch.uint8
    if codes.dtype != wanted:
        raise TypeError(f"codes must be {wanted} for bits={bits}, got {codes.dtype}")
    if zero_point.dtype != torch.int32:
        raise TypeError(f"zero_point must be int32, got {zero_point.dtype}")
    if bits == 4:
        if shape is None:
            raise ValueError("shape must be given for bits=4: two codes are in a byte")
        size = torch.Size(shape)
        if codes.shape != ((size.numel() + 1) // 2,):
            raise ValueError(
                f"shape must fit the codes: {tuple(size)} does not fit {tuple(codes.shape)} bytes"
            )
        codes, values = codes.contiguous(), codes.new_empty(size, device="meta")
    else:
        values = codes
    op_block_size, scale_shape = _scales(values, granularity, block_size)
    for name, given in (("scale", scale), ("zero_point", zero_point)):
        if tuple(given.shape) != scale_shape:
            raise ValueError(f"{name} must have shape {scale_shape}, got {tuple(given.shape)}")
    return reference.dequantize_affine(
        codes, scale.contiguous(), zero_point.contiguous(), bits, op_block_size, values.shape, dtype
    )
