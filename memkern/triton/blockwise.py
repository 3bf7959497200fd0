"""Kernels of memkern::quantize_blockwise and memkern::dequantize_blockwise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quant import codec as C
from ..quant.layout import FLOATS, BlockLayout, check_block_size, check_codes, layout_of
from ..reference.blockwise import check_codec
from .codec import decode, decode_unit, dither, dynamic_tables, encode
from .launch import address_of, cdiv, guard, options_of, rows_of
from .tile import is_flat, next_power_of_two, pointer, tile_of, vector_of

_INF = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(C.LARGEST_MARKED_SCALE)
_LAYOUT_ARGS = ["numel", "segment", "block", "per_segment", "blocks"]
_JIT = {
    "do_not_specialize": [*_LAYOUT_ARGS, "step_offset"],
    "do_not_specialize_on_alignment": ["values", "codes", "scales"],
}


@triton.jit(**_JIT)
def quantize_tiles(
    values, codes, scales, tables, step_offset,
    numel, segment, block, per_segment, blocks,
    KIND: tl.constexpr, SIGNED: tl.constexpr, DITHERED: tl.constexpr, MARKED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    start, offset, mask, row, row_mask = tile_of(
        tl.program_id(0), (numel, segment, block, per_segment, blocks), ROWS, BLOCK, VECTOR, FLAT
    )
    values = pointer(values, start, values.dtype.element_ty, VECTOR)
    codes = pointer(codes, start, codes.dtype.element_ty, VECTOR)
    x = tl.load(values + offset, mask=mask, other=0.0).to(tl.float32)
    if not SIGNED:
        x = tl.where(x < 0, 0.0, x)
    u = dither(tl.arange(0, BLOCK), step_offset.to(tl.uint32))[None, :] if DITHERED else 0.5
    q, scale = encode(x, u, tables, KIND, SIGNED, DITHERED)
    if MARKED:
        marked = tl.max(tl.where(tl.abs(x) < _INF, 0, 1), axis=1) != 0
        q = tl.where(marked[:, None], 0, q)
        # Not a global NaN: Triton compares globals at each launch, and that one would have changed.
        scale = tl.where(marked, float("nan"), tl.minimum(scale, _LARGEST))
    tl.store(codes + offset, q, mask=mask)
    tl.store(scales + row, scale, mask=row_mask)


@triton.jit(**_JIT)
def dequantize_tiles(
    values, codes, scales, tables,
    numel, segment, block, per_segment, blocks,
    KIND: tl.constexpr, SIGNED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    start, offset, mask, row, row_mask = tile_of(
        tl.program_id(0), (numel, segment, block, per_segment, blocks), ROWS, BLOCK, VECTOR, FLAT
    )
    values = pointer(values, start, values.dtype.element_ty, VECTOR)
    codes = pointer(codes, start, codes.dtype.element_ty, VECTOR)
    unit = decode_unit(tl.load(scales + row, mask=row_mask, other=0.0), 1.0, KIND, SIGNED)
    q = tl.load(codes + offset, mask=mask, other=0)
    x = decode(q, unit, tables, KIND, SIGNED)
    tl.store(values + offset, x.to(values.dtype.element_ty), mask=mask)


def shape_of(layout: BlockLayout, block_size: int, values: Tensor, codes: Tensor) -> dict[str, int]:
    """The constexpr arguments of both kernels that depend on shapes and addresses."""
    block = next_power_of_two(block_size)
    return {
        "ROWS": rows_of(block),
        "BLOCK": block,
        "VECTOR": vector_of(layout, values.element_size(), (address_of(values, "x"), address_of(codes, "codes"))),
        "FLAT": is_flat(layout, block),
    }


def layout_args(layout: BlockLayout) -> tuple[int, ...]:
    return layout.numel, layout.segment, layout.block, layout.blocks_per_segment, layout.blocks


def quantize_blockwise(
    x: Tensor,
    codec: int,
    signed: bool,
    block_size: int,
    step: int | None = None,
    mark_nonfinite: bool = False,
) -> tuple[Tensor, Tensor]:
    """The op behind :func:`memkern.quantize_blockwise`."""
    check_codec(codec)
    check_block_size(block_size)
    if x.dtype not in FLOATS:
        raise TypeError(f"x must be float32, bfloat16 or float16, got {x.dtype}")
    layout = layout_of(x, block_size)
    codes = torch.empty_like(x, dtype=torch.int8 if signed else torch.uint8)
    scale = x.new_empty(layout.scale_shape, dtype=torch.float32)
    if layout.numel:
        shape = shape_of(layout, block_size, x, codes)
        with guard(x.device):
            quantize_tiles[(cdiv(layout.blocks, shape["ROWS"]),)](
                x, codes, scale, dynamic_tables(x.device), (step or 0) * C.DITHER_STEP % 2**32,
                *layout_args(layout),
                KIND=codec + 1, SIGNED=signed, DITHERED=step is not None, MARKED=mark_nonfinite,
                **shape, **options_of(shape["BLOCK"]),
            )  # fmt: skip
    return codes, scale


def dequantize_blockwise(codes: Tensor, scale: Tensor, codec: int, block_size: int, dtype: torch.dtype) -> Tensor:
    """The op behind :func:`memkern.dequantize_blockwise`."""
    check_codec(codec)
    check_block_size(block_size)
    layout = check_codes(codes, scale, block_size, dtype)
    scale = scale.contiguous()
    out = torch.empty_like(codes, dtype=dtype)
    if layout.numel:
        shape = shape_of(layout, block_size, out, codes)
        address_of(scale, "scale")
        with guard(codes.device):
            dequantize_tiles[(cdiv(layout.blocks, shape["ROWS"]),)](
                out, codes, scale, dynamic_tables(codes.device), *layout_args(layout),
                KIND=codec + 1, SIGNED=codes.dtype == torch.int8, **shape, **options_of(shape["BLOCK"]),
            )  # fmt: skip
    return out
