"""What a device holds of a model whose weights stay on the host (``weights_on_host``), as FSDP2 on one process does.

A group is what is brought together: a block, the embedding, the output layer, and the root with the rest.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from torch import nn

from ..blocks.block_lists import block_lists
from .shards import shard_bytes
from .trace import Trace


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

        When a group begins, the next one is brought: its weights, and beside them a copy of one tensor at a time. The
        last group (the output layer, if it is a group) stays between the passes, and the embedding is not brought for
        its backward pass. When a group's backward pass ends, its gradients are copied into one buffer and reduced into
        a second one, which goes to the host; both are there until the next group's backward pass ends. Where it is not
        known when a block's passes are, all of it is counted throughout.
        """
        if not trace.blocks:
            most = max(self.first, self.block, self.last)
            return [self.root + 5 * most] * (trace.end + 1)
        begins, ends = zip(*trace.blocks, strict=True)
        length = begins[-1] - begins[-2] if len(begins) > 1 else trace.middle - begins[-1]
        loss = begins[-1] + length  # the end of the last block's forward pass
        head = self._end_of_head(trace, ends[-1])
        begins_back = min(head, trace.middle if trace.head is None else trace.head)
        running = [(begin, end, 2 * self.block, self.tensor) for begin, end in itertools.pairwise(begins)]
        backward = [(end, begin, 4 * self.block, 0) for begin, end in itertools.pairwise(ends)]
        found = [self.root + 2 * self.first] * (trace.end + 1)
        for begin, end, size, arrives in (
            (0, begins[0], self.first + self.block, self.tensor),
            *running,
            (begins[-1], loss, self.block + self.last, self.last),
            (loss, begins_back, self.last or self.block, 0),
            (begins_back, head, self.last + self.block, 0),
            (head, ends[-1], 2 * self.block + 2 * self.last, 0),
            *backward,
            (ends[0], trace.end, self.block + max(self.first, self.block), 0),
        ):
            found[begin + 1 : end + 1] = [self.root + size] * (end - begin)
            if begin < end:
                found[begin + 1] += arrives
        # Also the next block's beginning, which the traces' extension takes for any block's.
        found[ends[-1]] = max(found[ends[-1]], self.root + 4 * self.block)
        return found

    @staticmethod
    def _end_of_head(trace: Trace, block: int) -> int:
        """When the last of the gradients was accumulated that come before those of the last block."""
        outside = [at for s, at in trace.accumulated.items() if s not in trace.of_blocks]
        return max((at for at in outside if trace.middle < at < block), default=trace.middle)


def outside_of_blocks(model: nn.Module) -> tuple[int, int, int]:
    """Bytes of the weights of the embedding and of the output layer, 0 if tied, and of a block's largest tensor.

    Tied weights are one group that is there from the beginning of the step to its end: part of the root.
    """
    inside = {p for blocks in block_lists(model) for block in blocks for p in block.parameters()}
    layers = (_layer(model, "get_input_embeddings"), output_layer(model))
    first, last = ({*layer.parameters()} - inside if layer is not None else set() for layer in layers)
    if first & last:
        first = last = set()
    largest = max((p.numel() * p.element_size() for p in inside), default=0)
    return shard_bytes(first, 1), shard_bytes(last, 1), largest


def output_layer(model: nn.Module) -> nn.Module | None:
    """Of a model of transformers."""
    return _layer(model, "get_output_embeddings")


def _layer(model: Any, name: str) -> nn.Module | None:
    try:
        found = getattr(model, name)()
    except (AttributeError, NotImplementedError):  # not of transformers, or a model without one
        return None
    return found if isinstance(found, nn.Module) else None
