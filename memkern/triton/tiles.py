"""Tiles: what one program works on, ROWS quantization blocks of one tensor as a tile of (ROWS, BLOCK).

BLOCK is a power of two, a layout's block at most that. Three kinds of tile, all constexpr:

==========  =====  ====  ==================================================================================
            ALIGN  FLAT
==========  =====  ====  ==================================================================================
plain       True   True  blocks of BLOCK elements follow one another; 16-byte accesses
ragged      True   no    rows end in short blocks, or blocks are shorter than BLOCK, but all start aligned
any         no     no    anything
==========  =====  ====  ==================================================================================
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..layout import BlockLayout

VECTOR = 8
"""Elements that the blocks of an aligned tile start at and end on multiples of."""


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def is_flat(layout: BlockLayout, block: int) -> bool:
    """Whether full blocks follow one another: none but the tensor's last is short."""
    return layout.block == block and (layout.segment == layout.numel or layout.segment % block == 0)


def is_aligned(layout: BlockLayout, *pointers: int) -> bool:
    """Whether all blocks start on and have multiples of VECTOR elements, and the tensors on 16 bytes."""
    return not (
        layout.numel % VECTOR
        or layout.segment % VECTOR
        or layout.block % VECTOR
        or any(pointer % 16 for pointer in pointers)
    )


@triton.jit
def tile_of(
    index, numel, segment, block, per_segment, blocks,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Where tile ``index`` begins; its elements' offsets from there and which of them exist; the same of its blocks."""
    first = index.to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    row_mask = row < tl.minimum(blocks - first, ROWS).to(tl.int32)
    if FLAT:
        start = first * BLOCK
        offset = row[:, None] * BLOCK + column[None, :]
        left = tl.minimum(numel - start, ROWS * BLOCK).to(tl.int32)
        if ALIGN:
            left = tl.multiple_of(left, 8)
        mask = offset < left
    else:
        # Blocks follow one another in memory, so offsets from the first are small, and may be found modulo 2^32.
        within = first % per_segment
        start = first // per_segment * segment + within * block
        if ALIGN:
            start = tl.multiple_of(start, 8)
        per_row = per_segment.to(tl.int32)
        place = within.to(tl.int32) + row
        rows = place // per_row
        place -= rows * per_row
        begin = rows * segment.to(tl.int32) + place * block.to(tl.int32) - (within * block).to(tl.int32)
        last = (segment - (per_segment - 1) * block).to(tl.int32)
        length = tl.where(place == per_row - 1, last, block.to(tl.int32))
        length = tl.where(row_mask, length, 0)
        if ALIGN:
            begin = tl.multiple_of(begin, 8)
            length = tl.multiple_of(length, 8)
        offset = begin[:, None] + column[None, :]
        mask = column[None, :] < length[:, None]
    return start, offset, mask, first + row, row_mask
