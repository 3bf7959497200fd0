"""Counts what FSDP2 (``fully_shard``) has on a device beside shards: unsharded weights, and collectives' buffers.

The weights are gathered from the shards of several devices (:class:`ShardedWeights`), or copied from the host's memory
(:class:`WeightsOnHost`, for ``weights_on_host``). A parameter group is what is unsharded together: each block is one,
and the root module's has all weights that are in no other. With weights on the host the embedding and the output layer
are groups too.
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
class ShardedWeights:
    """The parameter groups of a model that several devices share, by the bytes of their unsharded weights."""

    root: int = 0
    block: int = 0  # the largest
    root_shard: int = 0  # one device's part of the root's
    unreleased: int = 1
    """A count: buffers of a block's size that collectives still hold in a block's backward pass."""

    def extra_bytes(self, trace: Trace) -> list[int]:
        """Bytes beside the trace's storages and the shards, at the beginning and after each operator of a step.

        The root's weights are always there. Where the trace has no clocks of blocks, all buffers are, too.
        """
        if not trace.block_clocks:
            blocks = (3 + self.unreleased) * self.block  # weights, all-gather's output, reduce-scatter's input
            return [self.root + blocks] * trace.end + [self.root + max(blocks, self.root_shard)]
        forward_begins, backward_ends = zip(*trace.block_clocks, strict=True)
        last_forward_end, last_backward_begin, second_end = forward_begins[-1], backward_ends[-1], trace.forward_end
        if len(trace.block_clocks) > 1:  # the last block takes as many operators as the one before it
            last_forward_end = 2 * forward_begins[-1] - forward_begins[-2]
            last_backward_begin = 2 * backward_ends[-1] - backward_ends[-2]
            second_end = backward_ends[1]
        counted = [self.root] * (trace.end + 1)
        for begin, end, buffers in (  # clocks between which there are so many buffers of a block's size
            # Forward pass and loss: the all-gather's output, from which a block's weights are copied
            (forward_begins[0], trace.forward_end, 1),
            # Forward pass: the block's weights
            (forward_begins[0], last_forward_end, 1),
            # Backward pass: the block's weights, and what collectives still hold
            (last_backward_begin, backward_ends[0], 1 + self.unreleased),
            # Backward pass: the all-gather's output for the block that comes next, until only the first is left
            (trace.forward_end, second_end, 1),
            # Backward pass: the reduce-scatter's input, the gradients of the block whose backward pass has ended
            (backward_ends[-1], trace.end, 1),
        ):
            for clock in range(begin + 1, end + 1):
                counted[clock] += buffers * self.block
        # At the end the root's gradients are reduced: its weights are freed, the reduce-scatter's input takes as much,
        # and its output is a shard.
        counted[-1] = self.root + max(self.block, self.root_shard)
        return counted


@dataclasses.dataclass(frozen=True)
class WeightsOnHost:
    """The parameter groups of a model whose weights are on the host, by the bytes of their weights."""

    embedding: int = 0
    block: int = 0  # the largest
    output_layer: int = 0
    root: int = 0
    block_tensor: int = 0  # the largest tensor of a block

    def extra_bytes(self, trace: Trace) -> list[int]:
        """Bytes beside the trace's storages, at the beginning and after each operator of a step.

        When a group's pass begins, so does the copy of the next group's weights to the device, with a temporary copy of
        one tensor after another. When its backward pass ends, its gradients are packed into one buffer and reduced into
        a second one, which is copied to the host; both are there until the next group's backward pass ends. The root's
        weights are always there. Where the trace has no clocks of blocks, all buffers are, too.
        """
        embedding, block, output_layer = self.embedding, self.block, self.output_layer
        if not trace.block_clocks:
            # Two groups' weights, two buffers of gradients, and a tensor's temporary copy of up to a group's size
            return [self.root + 5 * max(embedding, block, output_layer)] * (trace.end + 1)
        forward_begins, backward_ends = zip(*trace.block_clocks, strict=True)
        last_forward_end = trace.forward_end
        if len(forward_begins) > 1:  # the last block takes as many operators as the one before it
            last_forward_end = 2 * forward_begins[-1] - forward_begins[-2]
        output_end = self._output_layer_end(trace)
        output_begin = min(output_end, trace.forward_end if trace.output_begin is None else trace.output_begin)
        counted = [self.root + 2 * embedding] * (trace.end + 1)
        # Clocks, bytes between them, and further bytes at the first operator. Previous and next: in the model's order
        for begin, end, size, first_more in (
            # Forward pass of the embedding: its weights and the first block's, which are being copied
            (0, forward_begins[0], embedding + block, self.block_tensor),
            # Forward pass of a block: its weights and the next one's
            *((a, b, 2 * block, self.block_tensor) for a, b in itertools.pairwise(forward_begins)),
            # Forward pass of the last block: its weights and the output layer's, which are one tensor
            (forward_begins[-1], last_forward_end, block + output_layer, output_layer),
            # From there to the backward pass: the last group's weights, which stay
            (last_forward_end, output_begin, output_layer or block, 0),
            # Backward pass of the output layer: its weights and the last block's
            (output_begin, output_end, output_layer + block, 0),
            # Backward pass of the last block: its weights, the previous one's, two buffers of the output's gradients
            (output_end, backward_ends[-1], 2 * block + 2 * output_layer, 0),
            # Backward pass of another block: its weights, the previous one's, two buffers of the next one's gradients
            *((a, b, 4 * block, 0) for b, a in itertools.pairwise(backward_ends)),
            # Backward pass of the embedding, which needs no weights: two buffers of the first block's gradients, or one
            # of them beside the embedding's own
            (backward_ends[0], trace.end, block + max(embedding, block), 0),
        ):
            counted[begin + 1 : end + 1] = [self.root + size] * (end - begin)
            if begin < end:
                counted[begin + 1] += first_more
        # peaks() extrapolates from this clock to models with more blocks: it must have what a middle block has here.
        counted[backward_ends[-1]] = max(counted[backward_ends[-1]], self.root + 4 * block)
        return counted

    @staticmethod
    def _output_layer_end(trace: Trace) -> int:
        """The clock when the output layer's backward pass ends; where there is none, the forward pass's end.

        That is when the last gradient outside of the blocks is accumulated, of those before the last block's end.
        """
        begin, last_block_end = trace.forward_end, trace.block_clocks[-1][1]
        outside = [clock for s, clock in trace.accumulated.items() if s not in trace.block_ends]
        return max((clock for clock in outside if begin < clock < last_block_end), default=begin)


def shard_shape(x: Tensor, devices: int) -> tuple[int, ...]:
    """The shape of the first device's shard: of the rows divided by the devices, rounded up."""
    return (-(-x.shape[0] // devices), *x.shape[1:]) if x.dim() else ()


def shard_bytes(params: Iterable[Tensor], devices: int) -> int:
    """The bytes of the first device's shards of some parameters."""
    return sum(math.prod(shard_shape(p, devices)) * p.element_size() for p in params)


def group_bytes(model: nn.Module, devices: int) -> dict[str, int]:
    """Bytes of a model's parameter groups, by the names of StaticBytes' fields; rows are padded to whole shards.

    outside_blocks: all that is in no block, embedding and output layer too. embedding, output_layer: 0 if they are
    tied, as they then belong to the root. block, block_tensor: the largest block, and the largest tensor of a block.
    """
    blocks = [{*block.parameters()} for like_blocks in block_lists(model) for block in like_blocks]
    inside = set().union(*blocks)
    layers = (_layer(model, "get_input_embeddings"), output_layer(model))
    embedding, output = ({*layer.parameters()} - inside if layer is not None else set() for layer in layers)
    if embedding & output:
        embedding = output = set()
    return {
        "outside_blocks": devices * shard_bytes((p for p in model.parameters() if p not in inside), devices),
        "block": max((devices * shard_bytes(block, devices) for block in blocks), default=0),
        "embedding": shard_bytes(embedding, 1),
        "output_layer": shard_bytes(output, 1),
        "block_tensor": max((p.numel() * p.element_size() for p in inside), default=0),
    }


def output_layer(model: nn.Module) -> nn.Module | None:
    """A transformers model's output layer; None for others."""
    return _layer(model, "get_output_embeddings")


def _layer(model: Any, method: str) -> nn.Module | None:
    """What a method of transformers' models returns; None for other models, and for one without such a layer."""
    try:
        layer = getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None
    return layer if isinstance(layer, nn.Module) else None
