"""Tiles: a program loads ROWS quantization blocks of one tensor as a tile of (ROWS, BLOCK).

BLOCK is a power of two, at least the layout's block. FLAT: every block but the tensor's last has BLOCK elements; else
rows may end in short blocks, or blocks be shorter than BLOCK. VECTOR: elements of one memory access, 4 or 8 where all
blocks are aligned, else 1. All four are constexpr arguments of a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable

import triton
import triton.language as tl

from ..quant.layout import BlockLayout

LINE = 8
"""The blocks of an aligned tile start and end at multiples of so many elements."""


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def is_flat(layout: BlockLayout, block: int) -> bool:
    """Whether every block but the tensor's last has ``block`` elements."""
    return layout.block == block and (layout.segment == layout.numel or layout.segment % block == 0)


def vector_of(layout: BlockLayout, widest: int, addresses: Iterable[int]) -> int:
    """VECTOR: elements of one access, 16 bytes of the widest element type (``widest`` bytes each), or 1.

    It is the same for all tensors of a kernel, so that Triton needs no layout conversion between their tiles.
    """
    aligned = not (layout.numel % LINE or layout.segment % LINE or layout.block % LINE)
    return 16 // max(widest, 2) if aligned and not any(a % 16 for a in addresses) else 1


@triton.jit
def pointer(address, start, dtype: tl.constexpr, VECTOR: tl.constexpr):
    """A pointer to element ``start`` of the array at an address, declared to be aligned to VECTOR elements."""
    p = address.to(tl.pointer_type(dtype)) + start
    if VECTOR > 1:
        p = tl.multiple_of(p, VECTOR * dtype.primitive_bitwidth // 8)
    return p


@triton.jit
def float_pointer(address, start, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """:func:`pointer` to quant.layout.FLOATS[DTYPE]. A dtype as constexpr argument would make each launch slower."""
    if DTYPE == 0:
        return pointer(address, start, tl.float32, VECTOR)
    elif DTYPE == 1:
        return pointer(address, start, tl.bfloat16, VECTOR)
    else:
        return pointer(address, start, tl.float16, VECTOR)


@triton.jit
def tile_of(index, layout, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, FLAT: tl.constexpr):
    """Tile ``index``: its first element, the elements' offsets from there and their mask, its blocks and their mask."""
    numel, segment, block, per_segment, blocks = layout
    first = index.to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    row_mask = row < tl.minimum(blocks - first, ROWS).to(tl.int32)
    if FLAT:
        start = first * BLOCK
        offset = row[:, None] * BLOCK + column[None, :]
        left = tl.minimum(numel - start, ROWS * BLOCK).to(tl.int32)
        if VECTOR > 1:
            left = tl.multiple_of(left, VECTOR)
        mask = offset < left
    else:
        # A tile's blocks are adjacent in memory, so offsets from the first fit in 32 bits, even if a product on the way
        # wraps around modulo 2^32.
        first_in_segment = first % per_segment
        first_offset = first_in_segment * block
        start = first // per_segment * segment + first_offset
        per_segment32 = per_segment.to(tl.int32)
        in_segment = first_in_segment.to(tl.int32) + row
        segments = in_segment // per_segment32
        in_segment -= segments * per_segment32
        begin = segments * segment.to(tl.int32) + in_segment * block.to(tl.int32) - first_offset.to(tl.int32)
        last = (segment - (per_segment - 1) * block).to(tl.int32)
        length = tl.where(in_segment == per_segment32 - 1, last, block.to(tl.int32))
        length = tl.where(row_mask, length, 0)
        if VECTOR > 1:
            start = tl.multiple_of(start, VECTOR)
            begin = tl.multiple_of(begin, VECTOR)
            length = tl.multiple_of(length, VECTOR)
        offset = begin[:, None] + column[None, :]
        mask = column[None, :] < length[:, None]
    return start, offset, mask, first + row, row_mask


@triton.jit
def load_floats(address, tile, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """Loads a tile (:func:`tile_of`) of dtype quant.layout.FLOATS[DTYPE], unconverted; 0 outside of the mask."""
    start, offset, mask, _, _ = tile
    return tl.load(float_pointer(address, start, DTYPE, VECTOR) + offset, mask=mask, other=0.0)


@triton.jit
def store_floats(x, address, tile, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    start, offset, mask, _, _ = tile
    at = float_pointer(address, start, DTYPE, VECTOR)
    tl.store(at + offset, x.to(at.dtype.element_ty), mask=mask)
