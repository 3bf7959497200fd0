"""A model's blocks: lists of like modules, such as a transformer's layers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def block_lists(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yields the lists of like blocks, such as a transformer's layers; of nested lists the outermost.

    Blocks are modules that can be called: a list of lists has none itself. An entry may be None, and a block may occur
    several times, as where layers share their weights; it is there once.
    """
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        found = [block for block in module if block is not None]
        if len(found) < 2 or len({*map(type, found)}) > 1 or type(found[0]).forward is nn.Module.forward:
            continue
        blocks = [*dict.fromkeys(found)]
        if any(True for _ in blocks[0].parameters()):
            inside |= {inner for block in blocks for inner in block.modules()}
            yield blocks
