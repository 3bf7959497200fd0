"""Computes the power codec in torch's operations, which Inductor compiles into the kernels of their neighbours.

The bits are those of ``memkern::quantize_blockwise`` and ``dequantize_blockwise`` wherever Inductor's code rounds
``mul`` and ``sqrt`` of fp32 correctly, as it does on CPUs and on NVIDIA's GPUs; no result depends on more:

- Inductor divides fp32 approximately in Triton, and multiplies by a reciprocal where a number is divided or divides.
  So the two divisions of a block are made in fp64. Rounding the quotient to fp64 and then to fp32 gives the correct
  float: relative to it, N^2 / s is at least 2^-49 from the middle of two floats, s / N^2 at least 2^-39.
- A product that is added to something may become a fused multiply-add. A decoded value cannot: its sign is set last.
- The factor of the backward pass, s / N^2, is saved in place of s, and is computed once per block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..quant.codec import LARGEST_MARKED_SCALE, POWER_LEVELS_SIGNED, POWER_LEVELS_UNSIGNED
from ..quant.layout import BlockLayout, layout_of
from .torch_internals import is_contiguous_or_false, statically_known_true


def is_possible(x: Tensor, block_size: int) -> bool:
    """Whether all blocks are full, so that codes are computed where a block's values are: no tail, no padding."""
    if x.numel() == 0:
        return False
    layout = layout_of(x, block_size)
    return statically_known_true(layout.segment % layout.block == 0)


def _order(x: Tensor) -> list[int]:
    """The dimensions of a dense tensor, from the outermost in memory to the innermost."""
    if is_contiguous_or_false(x):
        return list(range(x.dim()))
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda i: -strides[i])


def _to_blocks(x: Tensor, like: Tensor, layout: BlockLayout) -> Tensor:
    return x.permute(_order(like)).reshape(-1, layout.block)


def _from_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    order = _order(like)
    inverse = [order.index(i) for i in range(len(order))]
    return blocks.reshape([like.shape[i] for i in order]).permute(inverse)


def encode(x: Tensor, signed: bool, block_size: int) -> tuple[Tensor, Tensor]:
    """Codes of a dense tensor, and of each block what they are decoded with, NaN for a block with a NaN or inf."""
    blocks = _to_blocks(x, x, layout_of(x, block_size)).float()
    square = float(POWER_LEVELS_SIGNED**2 if signed else POWER_LEVELS_UNSIGNED**2)
    magnitude = blocks.abs() if signed else blocks.clamp_min(0)
    scale = magnitude.amax(1, keepdim=True)  # a maximum keeps NaN
    factor = (square / scale.double()).float()
    usable = (scale < math.inf) & (factor < math.inf)
    root = (magnitude * torch.where(usable, factor, 0)).sqrt()
    if signed:
        codes = torch.where(usable, torch.copysign(root.round(), blocks), 0).to(torch.int8)
    else:
        codes = (root + 0.5).floor().clamp(1, POWER_LEVELS_UNSIGNED)
        codes = torch.where(usable & (magnitude > 0), codes, 0).to(torch.uint8)
    unit = (scale.clamp_max(LARGEST_MARKED_SCALE).double() / square).float()
    unit = torch.where(scale < math.inf, unit, math.nan)
    return _from_blocks(codes, x), unit.squeeze(1)


def decode(codes: Tensor, unit: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    q = _to_blocks(codes, codes, layout_of(codes, block_size)).float()
    magnitude = unit.unsqueeze(1) * (q * q)
    blocks = torch.copysign(magnitude, q) if codes.dtype == torch.int8 else magnitude.abs()
    return _from_blocks(blocks.to(dtype), codes)
