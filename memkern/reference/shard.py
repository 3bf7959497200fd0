"""A step of one rank's shard of a tensor, where other ranks have elements of the same blocks.

Such a step runs twice. The first run, on copies, notes the largest value of each block on this rank. The values are
reduced over the ranks, and the second run, on the tensors themselves, takes the reduced ones in their place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..quant.layout import BlockLayout, memory_order
from ..schemas import StepArgs


class Shard:
    """The largest magnitudes of a shard's blocks, one tensor per moment: this rank's, and those of all ranks."""

    def __init__(self) -> None:
        self.noted: list[Tensor] = []
        self.reduced: list[Tensor] = []
        self._calls = 0  # of reduced_or_own, in this run

    def begin(self) -> None:
        """Starts a run: the first call of :meth:`reduced_or_own` is about the first moment again."""
        self.noted, self._calls = [], 0

    def reduced_or_own(self, own: Tensor) -> Tensor:
        """The magnitudes of all ranks, or this rank's own while the others' are not known."""
        self._calls += 1
        if self.reduced:
            return self.reduced[self._calls - 1]
        self.noted.append(own.clone())
        return own


class ShardLayout(BlockLayout):
    """The blocks of a shard: those of any tensor or, with ``places``, parts of the blocks of a whole tensor.

    ``places[i]`` is where the shard's i-th element in memory lies in its blocks. ``numbers`` are the numbers of its
    blocks among the ``total`` of the whole tensor. ``cut``: other ranks have elements of the same blocks, and the
    scales are those of the whole tensor.
    """

    shard: Shard
    places: Tensor | None
    numbers: Tensor
    total: int
    cut: bool

    @classmethod
    def of(cls, layout: BlockLayout, shard: Shard) -> ShardLayout:
        """A shard whose blocks are whole."""
        own = cls(*layout)
        own.shard, own.places, own.total, own.cut = shard, None, own.blocks, False
        return own

    @classmethod
    def of_elements(cls, whole: BlockLayout, index: Tensor, shard: Shard, cut: bool) -> ShardLayout:
        """A shard of the elements ``index`` of a whole tensor, both in memory order."""
        segment = max(1, whole.segment)
        column = index % segment
        number = index // segment * whole.blocks_per_segment + column // whole.block
        numbers, block = torch.unique(number, return_inverse=True)
        own = cls(index.numel(), index.numel(), whole.block, (whole.blocks if cut else numbers.numel(),))
        own.shard, own.numbers, own.total, own.cut = shard, numbers, whole.blocks, cut
        own.places = block * whole.block + column % whole.block
        return own

    @property
    def blocks(self) -> int:
        return super().blocks if getattr(self, "places", None) is None else self.numbers.numel()

    def to_blocks(self, x: Tensor) -> Tensor:
        """(blocks, block) in the dtype of x, with zeros where the shard has no element."""
        assert self.places is not None
        padded = x.new_zeros(self.blocks * self.block)
        padded[self.places] = memory_order(x)
        return padded.reshape(-1, self.block)

    def from_blocks(self, blocks: Tensor, out: Tensor) -> None:
        assert self.places is not None
        memory_order(out).copy_(blocks.reshape(-1)[self.places])

    def layers_of_blocks(self, count: int) -> Tensor:
        """Each block's layer, from 0 to below ``count``; layers are whole blocks."""
        return self.numbers // max(1, self.total // count)


class ShardArgs(StepArgs):
    """The arguments of a step of shards, which has their layouts."""

    layouts: list[ShardLayout]

    @classmethod
    def of(cls, args: StepArgs, layouts: list[ShardLayout]) -> ShardArgs:
        shard_args = cls(*args)
        shard_args.layouts = layouts
        return shard_args
