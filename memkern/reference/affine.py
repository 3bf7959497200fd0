"""Affine codes in plain PyTorch: the specification of :func:`memkern.quantize_affine`, on rows of fp32 values."""

from __future__ import annotations

import torch
from torch import Tensor

from .blockwise import dither

FARTHEST = 2.0**20
"""No zero point is further from zero than about so many steps: beyond, fp32 could not tell neighbouring codes apart."""


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
    # Halves: the difference of two large numbers of unlike sign would overflow.
    scale = (b / 2 - a / 2) / ((high - low) / 2)
    scale = torch.maximum(scale, size / FARTHEST)
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
    """``s (x_q - z)``, fp32: the difference is an integer and exact."""
    return scale[:, None] * (codes.to(torch.int32) - zero_point[:, None]).float()


def offsets(rows: int, columns: int, seed: int, device: torch.device) -> Tensor:
    """u in [0, 1) of stochastic rounding, from an element's place in memory and the seed."""
    return dither(rows * columns, seed, device).view(rows, columns)
