"""Counts what a device holds of a model whose weights are elsewhere: FSDP2's shards on several devices
(``fully_shard``), or weights that stay on the host (``weights_on_host``), as FSDP2 on one process has them.

A group is what is gathered, or brought, together: a block; the root with what is in no block; with weights on the host
also the embedding and the output layer.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..blocks.block_lists import block_lists
from .trace import Trace


@dataclasses.dataclass(frozen=True)
class Groups:
    """Bytes of whole weights on every device: ``root``, which stays for both passes; ``block``, the largest block's."""

    root: int = 0
    block: int = 0
    held: int = 1
    """A count: buffers of a block's size that collectives have not let go of in its backward pass."""
    shard: int = 0
    """A device's part of the root."""

    def beside(self, trace: Trace) -> list[int]:
        """Bytes beside the shards, at the beginning and after each operator of a step (its clock).

        A block's forward pass has the block and the buffer that it was gathered in. Its backward pass has the block,
        the buffer of the next one, the gradients of the one before, which are being reduced, and the buffers that are
        held; that of the loss has the last block's buffer. At the end the root's gradients are reduced: packed, in the
        collective's copy, where the weights were, and a device's part. Where it is not known when a block's passes are,
        all of it is counted throughout.
        """
        if not trace.blocks:
            blocks = (3 + self.held) * self.block
            return [self.root + blocks] * trace.end + [self.root + max(blocks, self.shard)]
        begins, ends = zip(*trace.blocks, strict=True)
        length, length_back = (begins[-1] - begins[-2], ends[-2] - ends[-1]) if len(ends) > 1 else (0, 0)
        last, last_back = begins[-1] + length, ends[-1] - length_back  # the last block's end, its backward pass's begin
        second_end = ends[1] if len(ends) > 1 else trace.middle
        counted = [self.root] * (trace.end + 1)
        for begin, end in (  # clocks between which one more buffer of a block's size is there
            (begins[0], trace.middle),  # forward pass and loss: the buffer that a block was gathered in
            (begins[0], last),  # forward pass: the block
            *[(last_back, ends[0])] * (1 + self.held),  # backward pass: the block, and the buffers that are held
            (trace.middle, second_end),  # backward pass: the next block's buffer, until only the first block is left
            (ends[-1], trace.end),  # backward pass: the gradients of the block before, which are being reduced
        ):
            for clock in range(begin + 1, end + 1):
                counted[clock] += self.block
        counted[-1] = self.root + max(self.block, self.shard)
        return counted


def shard_shape(x: Tensor, devices: int) -> tuple[int, ...]:
    """The shape of a device's part: the rows, divided and rounded up."""
    return (-(-x.shape[0] // devices), *x.shape[1:]) if x.dim() else ()


def shard_bytes(params: Iterable[Tensor], devices: int) -> int:
    return sum(math.prod(shard_shape(p, devices)) * p.element_size() for p in params)


@dataclasses.dataclass(frozen=True)
class Streamed:
    """Bytes of the groups' weights: ``first``, of the embedding; ``block``, of the largest block; ``last``, of the
    output layer; ``root``, of what is in none of these, which stays. tensor: of the largest tensor of a block."""

    first: int = 0
    block: int = 0
    last: int = 0
    root: int = 0
    tensor: int = 0

    def beside(self, trace: Trace) -> list[int]:
        """Bytes beside the trace's storages, at the beginning and after each operator of a step.

        When a group begins, the next one is brought, and beside it a copy of one tensor at a time. The output layer, if
        it is a group, stays between the passes, and the embedding is not brought for its backward pass. When a group's
        backward pass ends, its gradients are copied into one buffer and reduced into a second one, which goes to the
        host; both are there until the next group's ends. Where it is not known when a block's passes are, all of it is
        counted throughout.
        """
        if not trace.blocks:
            largest = max(self.first, self.block, self.last)
            return [self.root + 5 * largest] * (trace.end + 1)
        begins, ends = zip(*trace.blocks, strict=True)
        length = begins[-1] - begins[-2] if len(begins) > 1 else trace.middle - begins[-1]
        loss = begins[-1] + length  # the end of the last block's forward pass
        head_end = self._end_of_head(trace, ends[-1])
        begins_back = min(head_end, trace.middle if trace.head is None else trace.head)
        running = [(begin, end, 2 * self.block, self.tensor) for begin, end in itertools.pairwise(begins)]
        backward = [(end, begin, 4 * self.block, 0) for begin, end in itertools.pairwise(ends)]
        counted = [self.root + 2 * self.first] * (trace.end + 1)
        for begin, end, size, arrives in (  # clocks, bytes beside the root's, and further ones at the first operator
            (0, begins[0], self.first + self.block, self.tensor),
            *running,
            (begins[-1], loss, self.block + self.last, self.last),
            (loss, begins_back, self.last or self.block, 0),
            (begins_back, head_end, self.last + self.block, 0),
            (head_end, ends[-1], 2 * self.block + 2 * self.last, 0),
            *backward,
            (ends[0], trace.end, self.block + max(self.first, self.block), 0),
        ):
            counted[begin + 1 : end + 1] = [self.root + size] * (end - begin)
            if begin < end:
                counted[begin + 1] += arrives
        # peaks() extrapolates from this clock to models with more blocks: it must have what a middle block has here.
        counted[ends[-1]] = max(counted[ends[-1]], self.root + 4 * self.block)
        return counted

    @staticmethod
    def _end_of_head(trace: Trace, block: int) -> int:
        """The clock of the last gradient outside of the blocks that is accumulated before the last block's."""
        outside = [clock for s, clock in trace.accumulated.items() if s not in trace.of_blocks]
        return max((clock for clock in outside if trace.middle < clock < block), default=trace.middle)


def group_sizes(model: nn.Module, devices: int) -> dict[str, int]:
    """Bytes of the groups of a model, by the names of :class:`Groups` and :class:`Streamed`.

    root is all that is in no block, the embedding (first) and the output layer (last) too: ``Streamed.root`` is this
    less first and last; the caller subtracts. These are 0 if tied: such weights are there throughout a step.
    """
    blocks = [{*block.parameters()} for like_blocks in block_lists(model) for block in like_blocks]
    inside = set().union(*blocks)
    layers = (_layer(model, "get_input_embeddings"), output_layer(model))
    first, last = ({*layer.parameters()} - inside if layer is not None else set() for layer in layers)
    if first & last:
        first = last = set()
    return {
        "root": devices * shard_bytes((p for p in model.parameters() if p not in inside), devices),
        "block": max((devices * shard_bytes(block, devices) for block in blocks), default=0),
        "first": shard_bytes(first, 1),
        "last": shard_bytes(last, 1),
        "tensor": max((p.numel() * p.element_size() for p in inside), default=0),
    }


def output_layer(model: nn.Module) -> nn.Module | None:
    """A transformers model's output layer; None for others."""
    return _layer(model, "get_output_embeddings")


def _layer(model: Any, name: str) -> nn.Module | None:
    try:
        layer = getattr(model, name)()
    except (AttributeError, NotImplementedError):  # not of transformers, or a model without one
        return None
    return layer if isinstance(layer, nn.Module) else None
