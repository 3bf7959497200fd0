"""Activation checkpointing of a model's blocks, one by one or in segments, whatever library the model is from."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .config import ArgumentError


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer: of the lists of modules of one class, that with the most parameters."""

    def parameters(blocks: nn.ModuleList) -> int:
        return sum(parameter.numel() for parameter in blocks.parameters())

    lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and module and len({type(block) for block in module}) == 1
    ]
    return list(max(lists, key=parameters, default=[]))


class Segment:
    """Consecutive blocks whose inputs alone are saved, and which are recomputed together in the backward pass.

    The first block's forward runs them all; that of the others passes on its input, which is the last one's output. All
    get the arguments of the first.
    """

    def __init__(self, blocks: list[nn.Module]) -> None:
        self.forwards = [block.forward for block in blocks]
        self.returns_tuple = False
        for block, forward in zip(blocks, [self.first, *[self.other] * (len(blocks) - 1)], strict=True):
            block.forward = forward

    def run(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        for i, forward in enumerate(self.forwards):
            out = forward(hidden if i == 0 else self.hidden(out), *args, **kwargs)
        return out

    def hidden(self, out: Any) -> Any:
        self.returns_tuple = isinstance(out, tuple)
        return out[0] if self.returns_tuple else out

    def first(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.run(*args, **kwargs)
        return checkpoint(self.run, *args, use_reentrant=False, **kwargs)

    def other(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        return (hidden,) if self.returns_tuple else hidden


def checkpoint_blocks(model: nn.Module, mode: str) -> None:
    """Checkpoints every block ("blocks"), or segments of ceil(sqrt(L)) of the L blocks ("sqrt"), in place.

    Saved are L, or about sqrt(L), inputs of blocks, and while the backward pass is in a segment what its blocks save;
    Chen et al., arXiv 1604.06174. Gradients keep every bit, random numbers are drawn again as they were.

    Raises ArgumentError for a model without blocks, and with "sqrt" for one whose blocks get different arguments.
    """
    if mode == "none":
        return
    blocks = blocks_of(model)
    if not blocks:
        raise ArgumentError("checkpointing", f"{mode!r} given, but the model has no list of blocks; allowed: none")
    kinds = set(getattr(getattr(model, "config", None), "layer_types", None) or ())
    if mode == "sqrt" and len(kinds) > 1:
        raise ArgumentError(
            "checkpointing", f"'sqrt' given, but the blocks' masks differ ({', '.join(sorted(kinds))}); allowed: blocks"
        )
    size = math.ceil(math.sqrt(len(blocks))) if mode == "sqrt" else 1
    for begin in range(0, len(blocks), size):
        Segment(blocks[begin : begin + size])
