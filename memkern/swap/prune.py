"""Takes back the swaps that save nothing on the example."""

from __future__ import annotations

from typing import Any

from torch import nn

from .class_swap import attributes_of, become, original_class, revert
from .measure import total
from .report import Left, Swap, pattern
from .swap_plan import Compression


def prune(model: nn.Module, example: Any, compression: Compression) -> None:
    """Undoes each group of like swaps in turn, measures, and swaps it again only if that saves bytes."""
    modules = dict(model.named_modules(remove_duplicate=False))
    groups: dict[tuple[str, str, str], list[Swap]] = {}
    for swap in compression.swapped:
        groups.setdefault((pattern(swap.names[0]), swap.was, swap.now), []).append(swap)
    swapped = total(model, example)
    for group in groups.values():
        members = [modules[swap.names[0]] for swap in group]
        now = [(type(module), attributes_of(module)) for module in members]
        for module in members:
            revert(module)
        without = total(model, example)
        if without <= swapped:
            swapped = without
            for swap, module in zip(group, members, strict=True):
                compression.swapped.remove(swap)
                reason = "measured on the example: the swap saves nothing"
                compression.left.append(Left(swap.names, original_class(module).__name__, reason))
            continue
        for module, (cls, attributes) in zip(members, now, strict=True):
            _again(module, cls, attributes)


def _again(module: nn.Module, cls: type[nn.Module], attributes: dict[str, Any]) -> None:
    own = vars(module)
    changed = {k: v for k, v in attributes.items() if not k.startswith("_memkern") and own.get(k, own) is not v}
    become(module, cls, changed)
