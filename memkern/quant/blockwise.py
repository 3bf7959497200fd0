"""Quantizes and dequantizes tensors block-wise, in 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _ops
from .codec import CODECS
from .layout import FLOATS, check_block_size, check_codes, layout_of


def check_codec(codec: str) -> None:
    """Raises ValueError unless ``codec`` is the name of a codec."""
    if codec == "affine":
        raise ValueError(
            "codec 'affine' is for tensors (memkern.quantize_affine), not for optimizer states: its codes are "
            "equally far apart, so that small second moments become 0 and m / sqrt(v) explodes; use 'power'"
        )
    if codec not in CODECS:
        raise ValueError(f"codec must be one of {', '.join(map(repr, CODECS))}, got {codec!r}")


def quantize_blockwise(
    x: Tensor, *, codec: str = "power", signed: bool = True, block_size: int = 128, step: int | None = None
) -> tuple[Tensor, Tensor]:
    """Quantizes a tensor to 8-bit codes and one fp32 scale per block, the block's largest finite magnitude ``s``.

    ``power`` is a square-root law: codes of ``127 * sqrt(|x| / s)`` with x's sign where signed, of
    ``255 * sqrt(x / s)`` where not, and 0 only for 0 there. ``dynamic`` takes the nearest entry of the dynamic tree map
    of Dettmers et al. (arXiv 2110.02861). Formulas in full: :mod:`memkern.quant.codec`; how a tensor is cut into
    blocks: :mod:`memkern.quant.layout`.

    Args:
        x: float32, bfloat16 or float16, any shape, dense in memory (channels_last is).
        codec: ``"power"`` or ``"dynamic"``.
        signed: False for values that are not negative (a negative one is stored as 0).
        block_size: elements per block, a multiple of 8 from 8 to 4096.
        step: None rounds to the nearest code; a number rounds power codes with the dither of that step, as the
            optimizers do: what is stored is x on the average over the steps where signed, ``sqrt(x)`` where not.

    Returns:
        codes: int8 where signed, else uint8 (0 stands for 0 in both codecs); shape and strides of x.
        scale: float32, (rows, blocks per row), or (blocks,) where rows are shorter than a block.

    A non-finite value becomes code 0 where signed and the largest code where not, and does not enter the scale. A block
    of zeros, or where ``N^2 / s`` (or ``1 / s``) overflows, gets codes 0. Bytes per element: 1 + 4 / block_size.

    Raises:
        ValueError: unknown codec, a block size out of range, a tensor that is not dense.
        TypeError: a dtype that is not supported.
    """
    check_codec(codec)
    check_block_size(block_size)
    if x.dtype not in FLOATS:
        raise TypeError(f"x must be float32, bfloat16 or float16, got {x.dtype}")
    if step is not None and codec != "power":
        raise ValueError(f"step belongs to power codes, got codec={codec!r}")
    if x.layout != torch.strided:
        raise ValueError(f"x must be a dense tensor, got layout {x.layout}")
    layout_of(x, block_size)
    return _ops.quantize_blockwise(x.detach(), codec, signed, block_size, step)


def dequantize_blockwise(
    codes: Tensor,
    scale: Tensor,
    *,
    codec: str = "power",
    block_size: int = 128,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Dequantizes what :func:`quantize_blockwise` returned: ``(s / N^2) * (q * |q|)`` or ``table[q] * s``.

    Args:
        codes, scale: as returned by :func:`quantize_blockwise`, with the same ``codec`` and ``block_size``.
        dtype: of the result: float32, bfloat16 or float16.

    Raises:
        ValueError: unknown codec, a block size out of range, a scale that does not fit the codes.
        TypeError: a dtype that is not supported.
    """
    check_codec(codec)
    check_block_size(block_size)
    check_codes(codes, scale, block_size, dtype)
    return _ops.dequantize_blockwise(codes, scale.contiguous(), codec, block_size, dtype)
