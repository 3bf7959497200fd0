"""Finds a model's blocks: lists of modules of one class, such as a transformer's layers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def block_lists(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yields the lists of like blocks, such as a transformer's layers; of nested lists the outermost.

    Blocks are modules that can be called, not lists. Entries that are None are left out. A block that occurs several
    times, as where layers share their weights, is yielded once. Scripted modules are no blocks: all have one class.
    """
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        entries = [block for block in module if block is not None]
        if len(entries) < 2 or len({*map(type, entries)}) > 1:
            continue
        if getattr(type(entries[0]), "forward", None) in (None, nn.Module.forward):  # None: torch.jit.ScriptModule
            continue
        blocks = [*dict.fromkeys(entries)]
        if any(True for _ in blocks[0].parameters()):
            inside |= {inner for block in blocks for inner in block.modules()}
            yield blocks
