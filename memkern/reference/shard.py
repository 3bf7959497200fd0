"""A step of one rank's shard of a tensor of which other ranks have elements of the same blocks.

Such a step runs twice. First on copies, where the largest value of each block is noted as this rank alone has it; the
noted values are reduced over the ranks, and are what the run on the tensors themselves gets in their place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..quant.layout import BlockLayout, memory_order
from ..schemas import StepArgs


class Shard:
    """A shard's step exchanges the largest magnitudes of its blocks with other ranks, one moment after the other."""

    def __init__(self) -> None:
        self.noted: list[Tensor] = []
        self.reduced: list[Tensor] = []
        self._asked = 0

    def begin(self) -> None:
        """Before each run."""
        self.noted, self._asked = [], 0

    def of_all(self, own: Tensor) -> Tensor:
        """The magnitudes of all ranks, or this rank's own while the others' are not known."""
        self._asked += 1
        if self.reduced:
            return self.reduced[self._asked - 1]
        self.noted.append(own.clone())
        return own


class ShardLayout(BlockLayout):
    """The blocks of a shard: as of any tensor, or, with ``places``, those elements of a whole tensor's blocks it has.

    ``places[i]`` is where the shard's i-th element in memory lies in its blocks. ``numbers`` are those of its blocks
    among the whole tensor's ``total``. ``cut``: other ranks have elements of the same blocks, and the scales are those
    of the whole tensor.
    """

    shard: Shard
    places: Tensor | None
    numbers: Tensor
    total: int
    cut: bool

    @classmethod
    def of(cls, layout: BlockLayout, shard: Shard) -> ShardLayout:
        """A shard whose blocks are whole."""
        made = cls(*layout)
        made.shard, made.places, made.total, made.cut = shard, None, made.blocks, False
        return made

    @classmethod
    def of_elements(cls, whole: BlockLayout, index: Tensor, shard: Shard, cut: bool) -> ShardLayout:
        """A shard of the elements ``index`` of a whole tensor, both in memory order."""
        segment = max(1, whole.segment)
        column = index % segment
        number = index // segment * whole.blocks_per_segment + column // whole.block
        numbers, block = torch.unique(number, return_inverse=True)
        made = cls(index.numel(), index.numel(), whole.block, (whole.blocks if cut else numbers.numel(),))
        made.shard, made.numbers, made.total, made.cut = shard, numbers, whole.blocks, cut
        made.places = block * whole.block + column % whole.block
        return made

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
        """The number of the layer, of ``count``, that each block is of; layers are whole blocks."""
        return self.numbers // max(1, self.total // count)


class ShardArgs(StepArgs):
    """The arguments of a step of shards, which has their layouts."""

    layouts: list[ShardLayout]

    @classmethod
    def of(cls, args: StepArgs, layouts: list[ShardLayout]) -> ShardArgs:
        made = cls(*args)
        made.layouts = layouts
        return made
