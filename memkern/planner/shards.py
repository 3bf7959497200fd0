"""What a device holds of a model that ``fully_shard`` (FSDP2) shards over several."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..blocks.block_lists import block_lists
from .trace import Trace


@dataclasses.dataclass(frozen=True)
class Groups:
    """Bytes of the groups that are gathered together, on every device: ``root``, of what is in no block, which stays
    from the beginning of the forward pass to the end of the backward pass; ``block``, of the largest block."""

    root: int = 0
    block: int = 0
    held: int = 1
    """Buffers of a block's size that collectives have not let go of in its backward pass."""
    shard: int = 0
    """Of the root, a device's part."""

    def beside(self, trace: Trace) -> list[int]:
        """Bytes beside the shards, at the beginning and after each operator of a step.

        A block's forward pass has the block, and the buffer that it was gathered in, which is freed when the next block
        has been gathered. Its backward pass has the block, the buffer of the next one, which is gathered meanwhile, and
        the gradients of the one before, which are being reduced, and the buffers that are held; that of the loss has
        the last block's buffer. At the end the root's gradients are reduced: packed, in the collective's copy, where
        the weights were, and a device's part. Where it is not known when a block's passes are, all of it is
        counted throughout.
        """
        if not trace.blocks:
            blocks = (3 + self.held) * self.block
            return [self.root + blocks] * trace.end + [self.root + max(blocks, self.shard)]
        begins, ends = zip(*trace.blocks, strict=True)
        length, length_back = (begins[-1] - begins[-2], ends[-2] - ends[-1]) if len(ends) > 1 else (0, 0)
        last, last_back = begins[-1] + length, ends[-1] - length_back  # ends and begins
        found = [self.root] * (trace.end + 1)
        for begin, end in (
            (begins[0], trace.middle),
            (begins[0], last),
            *[(last_back, ends[0])] * (1 + self.held),
            (trace.middle, (*ends, trace.middle)[1]),
            (ends[-1], trace.end),
        ):
            for clock in range(begin + 1, end + 1):
                found[clock] += self.block
        found[-1] = self.root + max(self.block, self.shard)
        return found


def shard_shape(x: Tensor, devices: int) -> tuple[int, ...]:
    """The shape of a device's part: the rows, divided and rounded up."""
    return (-(-x.shape[0] // devices), *x.shape[1:]) if x.dim() else ()


def shard_bytes(params: Iterable[Tensor], devices: int) -> int:
    shapes = ((torch.Size(shard_shape(p, devices)), p.element_size()) for p in params)
    return sum(shape.numel() * size for shape, size in shapes)


def groups_of(model: nn.Module, devices: int) -> Groups:
    """The groups of a model whose blocks are sharded, and then the model itself."""
    blocks = [block for each in block_lists(model) for block in each]
    sizes = [devices * shard_bytes(block.parameters(), devices) for block in blocks]
    inside = {p for block in blocks for p in block.parameters()}
    root = devices * shard_bytes((p for p in model.parameters() if p not in inside), devices)
    return Groups(root, max(sizes, default=0))
