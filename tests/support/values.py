"""Tensors that are hard to quantize: blocks are tiny, huge, constant, of random bits, or have NaN or infinities."""

from __future__ import annotations

import torch
from torch import Tensor


def hard_to_quantize(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Blocks of 128 values, of these kinds in turn: normal, of many magnitudes, of any bits, of any finite bits,
    denormal, tiny, huge, mostly 0, all 0 (some of them -0), with one NaN, with one infinity, equal.
    """
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() // 128
    normal = torch.randn(count, 128, generator=generator)
    bits = torch.randint(-(2**31), 2**31, (count, 128), generator=generator).int().view(torch.float32)
    zero = 0.0 * normal
    at_5 = torch.arange(128) == 5
    kinds = (
        normal,
        normal * torch.exp(20 * torch.randn(count, 128, generator=generator)),
        bits,
        bits.where(bits.isfinite(), zero),
        normal * 1e-41,
        normal * 1e-36,
        normal * 1e38,
        normal.where(normal.abs() > 2, zero),
        zero,
        torch.nan_to_num(normal).masked_fill(at_5, float("nan")),
        normal.masked_fill(at_5, -float("inf")),
        torch.full_like(normal, -3.0),
    )
    kind = torch.arange(count)[:, None] % len(kinds)
    x = zero
    for i, values in enumerate(kinds):
        x = values.where(kind == i, x)
    return x.view(shape).to(dtype)
