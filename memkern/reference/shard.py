"""What a step of one rank's shard of a tensor needs, where other ranks have elements of the same blocks.

A block's scale is the largest magnitude in it, which no rank knows alone. Such a step runs twice. The first run, on
copies, finds the largest magnitudes of this rank. These are reduced over the ranks, and the second run, on the tensors
themselves, takes the reduced ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..quant.layout import BlockLayout, memory_order
from ..schemas import StepArgs


class BlockMagnitudes:
    """The largest magnitudes of the blocks of one tensor, by its moments: this rank's, and those of all ranks."""

    def __init__(self) -> None:
        self.own: list[Tensor] = []  # by moment, from the first run
        self.reduced: list[Tensor] = []  # by moment; empty before the reduction
        self._moment = 0  # the moment that the next call of reduced_or_own is about

    def begin_run(self) -> None:
        """To be called before each of the two runs: the next moment is the first one."""
        self.own, self._moment = [], 0

    def reduced_or_own(self, own: Tensor) -> Tensor:
        """The next moment's magnitudes: of all ranks in the second run, and of this one (``own``) in the first."""
        if not self.reduced:
            self.own.append(own.clone())
            return own
        self._moment += 1
        return self.reduced[self._moment - 1]


class ShardLayout(BlockLayout):
    """The blocks of a shard, which may be parts of the whole tensor's blocks."""

    magnitudes: BlockMagnitudes
    places: Tensor | None  # of the shard's elements, in memory order, in its blocks; None where these are whole
    numbers: Tensor  # of its blocks, among those of the whole tensor; only with places
    total: int  # blocks of the whole tensor
    cut: bool  # whether other ranks have elements of the same blocks: then the scales are those of the whole tensor

    @classmethod
    def of_whole_blocks(cls, layout: BlockLayout) -> ShardLayout:
        """A shard whose blocks are whole: they are those of any tensor."""
        own = cls(*layout)
        own.magnitudes, own.places, own.total, own.cut = BlockMagnitudes(), None, own.blocks, False
        return own

    @classmethod
    def of_elements(cls, whole: BlockLayout, index: Tensor, cut: bool) -> ShardLayout:
        """A shard of the elements ``index`` of a whole tensor, both in memory order."""
        segment = max(1, whole.segment)
        column = index % segment
        number = index // segment * whole.blocks_per_segment + column // whole.block
        numbers, block = torch.unique(number, return_inverse=True)
        own = cls(index.numel(), index.numel(), whole.block, (whole.blocks if cut else numbers.numel(),))
        own.magnitudes, own.numbers, own.total, own.cut = BlockMagnitudes(), numbers, whole.blocks, cut
        own.places = block * whole.block + column % whole.block
        return own

    @property
    def blocks(self) -> int:
        return super().blocks if getattr(self, "places", None) is None else self.numbers.numel()

    def to_blocks(self, x: Tensor) -> Tensor:
        """A shard's elements x as (blocks, block), with zeros where others have the block's elements."""
        assert self.places is not None
        padded = x.new_zeros(self.blocks * self.block)
        padded[self.places] = memory_order(x)
        return padded.reshape(-1, self.block)

    def from_blocks(self, blocks: Tensor, out: Tensor) -> None:
        """Writes the shard's elements of such blocks into ``out``."""
        assert self.places is not None
        memory_order(out).copy_(blocks.reshape(-1)[self.places])

    def layers_of_blocks(self, count: int) -> Tensor:
        """Each block's layer, from 0 to below ``count``; layers are whole blocks."""
        return self.numbers // max(1, self.total // count)


class ShardArgs(StepArgs):
    """The arguments of a step of shards, with their layouts."""

    layouts: list[ShardLayout]

    @classmethod
    def of(cls, args: StepArgs, layouts: list[ShardLayout]) -> ShardArgs:
        shard_args = cls(*args)
        shard_args.layouts = layouts
        return shard_args
