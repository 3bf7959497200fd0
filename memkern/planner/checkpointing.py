"""Activation checkpoints around a model's blocks, one by one or several together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .techniques import TechniqueError


def block_lists(model: nn.Module) -> Iterator[list[nn.Module]]:
    """The lists of like blocks, such as a transformer's layers; of nested ones the outermost."""
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        blocks = list(module)
        if len(blocks) > 1 and len({*map(type, blocks)}) == 1 and any(True for _ in blocks[0].parameters()):
            inside |= {inner for block in blocks for inner in block.modules()}
            yield blocks


def _group(blocks: list[nn.Module]) -> None:
    """The last block runs all of them in one checkpoint; those before it note their arguments and return the input."""
    forwards = [block.forward for block in blocks]
    calls: list[tuple[Any, Any]] = []

    def run(x: Tensor, calls: list[tuple[Any, Any]]) -> Tensor:
        for forward, (args, kwargs) in zip(forwards, calls, strict=True):
            x = forward(x, *args, **kwargs)
        return x

    def note(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append((args, kwargs))
        return x

    def last(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        noted = [*calls, (args, kwargs)]
        calls.clear()
        return checkpoint(run, x, noted, use_reentrant=False)

    for block in blocks[:-1]:
        block.forward = note
    blocks[-1].forward = last


def checkpoint_blocks(model: nn.Module, how: str) -> None:
    """Puts checkpoints around every block ("blocks"), or around groups of sqrt(L) of L blocks ("sqrt"), in place.

    Blocks take a tensor and return it changed; what else they take may differ from block to block.

    Raises:
        TechniqueError: the model has no list of blocks.
    """
    lists = list(block_lists(model))
    if not lists:
        raise TechniqueError("checkpointing", how, "'none' for a model without a list of like blocks")
    for blocks in lists:
        size = 1 if how == "blocks" else math.isqrt(len(blocks) - 1) + 1
        for start in range(0, len(blocks), size):
            _group(blocks[start : start + size])
