"""A model's blocks: lists of like modules, such as a transformer's layers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def block_lists(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yields the lists of like blocks, such as a transformer's layers; of nested lists the outermost."""
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        blocks = list(module)
        if len(blocks) > 1 and len({*map(type, blocks)}) == 1 and any(True for _ in blocks[0].parameters()):
            inside |= {inner for block in blocks for inner in block.modules()}
            yield blocks
