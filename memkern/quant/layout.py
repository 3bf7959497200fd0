"""Cuts tensors into blocks, each with a scale. ``csrc/common/layout.h`` mirrors it.

A dense tensor, taken in memory order, is ``rows`` (its outermost dimension in memory) times
``cols = numel / rows``. Where ``cols >= block_size`` a block is a run of ``block_size`` consecutive elements inside
one row; the last of a row may be short. Where rows are shorter, a block is ``block_size // cols`` whole rows.
So a shard of whole rows (of whole groups of rows where rows are short) has the same blocks as the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from .codec import MAX_BLOCK_SIZE, MIN_BLOCK_SIZE

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of parameters, gradients and everything else that is quantized."""


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of a dtype are computed: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class BlockLayout(NamedTuple):
    """``numel`` elements in segments of ``segment``, each cut into blocks of ``block``; a scale per block."""

    numel: int
    segment: int  # a row, or the whole tensor where rows are shorter than a block
    block: int
    scale_shape: tuple[int, ...]

    @property
    def blocks_per_segment(self) -> int:
        return -(-self.segment // self.block) if self.numel else 0

    @property
    def blocks(self) -> int:
        return self.numel // self.segment * self.blocks_per_segment if self.numel else 0


def check_block_size(block_size: int) -> None:
    """Raises ValueError unless ``block_size`` is a multiple of 8 from 8 to 4096."""
    if (
        not isinstance(block_size, int)
        or isinstance(block_size, bool)
        or block_size % 8
        or not MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE
    ):
        raise ValueError(
            f"block_size must be a multiple of 8 from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}, got {block_size!r}"
        )


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill one range of memory without gaps or overlap (in any order of dimensions)."""
    if 0 in shape:
        return True
    # Loops, no sorted() and no generator: torch.compile breaks the graph there where sizes are symbolic.
    expected, remaining = 1, [i for i in range(len(shape)) if shape[i] != 1]
    while remaining:
        innermost = remaining[0]
        for i in remaining:
            if strides[i] < strides[innermost]:
                innermost = i
        if strides[innermost] != expected:
            return False
        expected *= shape[innermost]
        remaining.remove(innermost)
    return True


def dense(x: Tensor) -> Tensor:
    """x, or a copy without gaps and overlaps."""
    return x if is_dense(x.shape, x.stride()) else torch.empty_like(x).copy_(x)


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements of memory from a tensor's first to its last."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may lie at one place in memory. May be true without overlap."""
    reach = 0  # what the smaller strides span: each stride must be larger
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if size == 0:
            return False
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def row_count(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The size of a dense tensor's outermost dimension in memory."""
    # Dimension 0 of size 1 counts as outermost: it may be a shard of one row. Others of size 1 have no real stride.
    if not len(shape) or shape[0] == 1:
        return 1
    outermost = -1
    for i in range(len(shape)):
        if shape[i] != 1 and (outermost < 0 or strides[i] > strides[outermost]):
            outermost = i
    return shape[outermost] if outermost >= 0 else 1


def block_layout(shape: Sequence[int], strides: Sequence[int], block_size: int) -> BlockLayout:
    """The layout of a dense tensor of ``shape`` and ``strides`` (in elements).

    Raises:
        ValueError: the tensor is not dense (its elements leave gaps or overlap).
    """
    if not is_dense(shape, strides):
        raise ValueError(
            f"a dense tensor is needed, got shape {tuple(shape)} with strides {tuple(strides)}; "
            "use tensor.contiguous() or clone()"
        )
    numel = 1
    for size in shape:
        numel *= size
    if numel == 0:
        return BlockLayout(0, 0, block_size, (0,))
    rows = row_count(shape, strides)
    cols = numel // rows
    if cols >= block_size:
        return BlockLayout(numel, cols, block_size, (rows, -(-cols // block_size)))
    group = block_size // cols
    return BlockLayout(numel, numel, group * cols, (-(-rows // group),))


def layout_of(tensor: torch.Tensor, block_size: int) -> BlockLayout:
    """:func:`block_layout` of a tensor."""
    return block_layout(tensor.shape, tensor.stride(), block_size)


EVERY_ROW = 0
"""The value of an op's ``layers`` that makes each row a layer."""


def layer_count(p: torch.Tensor, block_size: int, layers: int) -> int:
    """The number of layers of a tensor: equal runs of its rows, each with a trust ratio of its own.

    ``layers``: their number, or :data:`EVERY_ROW`. A tensor of fewer than two dimensions is one layer.

    Raises:
        ValueError: the rows do not divide into them, or a layer would end inside a block.
    """
    if layers == 1 or p.dim() < 2 or p.numel() == 0:
        return 1
    layout, rows = layout_of(p, block_size), row_count(p.shape, p.stride())
    count = rows if layers == EVERY_ROW else layers
    if count < 1 or rows % count:
        raise ValueError(f"layers must divide the rows of a tensor, {rows} of shape {tuple(p.shape)}, got {layers}")
    spans_rows = layout.segment == layout.numel  # blocks of several rows; else each row begins a block
    if count > 1 and spans_rows and p.numel() // count % layout.block:
        raise ValueError(
            f"a layer must end where a block does: {count} layers of a tensor of shape {tuple(p.shape)} end "
            f"inside its blocks of {layout.block}; choose a block_size of at most {p.numel() // rows}, a row's length"
        )
    return count


def memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A 1-D view of a dense tensor's elements in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def same_layout(x: torch.Tensor, p: torch.Tensor) -> bool:
    """Whether ``x`` and ``p`` have the same shape and strides (the stride of a dimension of size 1 does not count)."""
    return x.shape == p.shape and (
        x.stride() == p.stride()
        or all(a == b for a, b, n in zip(x.stride(), p.stride(), p.shape, strict=True) if n > 1)
        or p.numel() == 0
    )


def laid_out_alike(tensors: Sequence[torch.Tensor], params: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """``tensors``, with a copy of each that does not lie in memory as its parameter does.

    Tensors whose shape, device or dtype does not fit are returned unchanged: the step has messages for them.
    """
    if len(tensors) != len(params) or all(map(torch.Tensor.is_contiguous, chain(tensors, params))):
        return tensors
    return [
        torch.empty_like(p, dtype=x.dtype, requires_grad=False).copy_(x)
        if x.shape == p.shape
        and x.device == p.device
        and (x.dtype in FLOATS or x.dtype == p.dtype)
        and not same_layout(x, p)
        else x
        for x, p in zip(tensors, params, strict=True)
    ]


def check_codes(codes: torch.Tensor, scale: torch.Tensor, block_size: int, dtype: torch.dtype) -> BlockLayout:
    """The layout of 8-bit codes. Raises TypeError or ValueError unless they, their scale and ``dtype`` fit together."""
    if codes.dtype not in (torch.int8, torch.uint8):
        raise TypeError(f"codes must be int8 (signed) or uint8, got {codes.dtype}")
    if dtype not in FLOATS:
        raise TypeError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
    layout = layout_of(codes, block_size)
    if scale.dtype != torch.float32 or tuple(scale.shape) != layout.scale_shape:
        raise ValueError(
            f"scale must be float32 of shape {layout.scale_shape} for codes of shape {tuple(codes.shape)} and "
            f"block_size {block_size}, got {scale.dtype} of shape {tuple(scale.shape)}"
        )
    return layout
