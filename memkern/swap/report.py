"""The report of ``memkern.compress``: what was swapped, and how many bytes that saves."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator


@dataclasses.dataclass(frozen=True)
class Swap:
    """A module that saves less for the backward pass than before."""

    names: tuple[str, ...]  # where it is, once for each use
    was: str  # its class before the swap
    now: str  # its repr after it
    before: float  # bytes saved per element (of a linear layer: of its input) before the swap
    after: float  # the same after it
    width: tuple[int, str] | None  # elements per token, and the name of the layer it was read from, or None

    @property
    def bytes_per_token(self) -> float | None:
        """How many bytes fewer are saved per token, over all uses."""
        return None if self.width is None else (self.before - self.after) * self.width[0] * len(self.names)


@dataclasses.dataclass(frozen=True)
class Left:
    """A module that was left alone although it is, or calls, something that has a counterpart."""

    names: tuple[str, ...]
    what: str
    reason: str


def pattern(name: str) -> str:
    """A module's name with * in place of its numbers."""
    return re.sub(r"\d+", "*", name) or "the model itself"


def _grouped(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """One line for all rows whose names differ in numbers only and whose texts are equal."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, text in rows:
        groups.setdefault((pattern(name), text), []).append(name)
    for (shared_name, text), names in groups.items():
        count = f" ({len(names)} of them)" if len(names) > 1 else ""
        shown = shared_name if count else (names[0] or shared_name)  # the model itself has no name
        yield f"  {shown}{count}: {text}"


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of ``memkern.compress``; ``print`` shows it."""

    swapped: tuple[Swap, ...]
    left: tuple[Left, ...]
    marked: tuple[str, ...]  # embeddings whose weights get 32-bit optimizer states

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token that are no longer saved, over the modules whose width is known.

        An upper bound where several layers save the same tensor (query, key and value layers, or an activation that
        ends in a linear layer that saves it): ``memkern.memory.saved_bytes`` measures.
        """
        return sum(swap.bytes_per_token or 0.0 for swap in self.swapped)

    def _swaps(self) -> Iterator[tuple[str, str]]:
        for swap in self.swapped:
            text = f"{swap.was} -> {swap.now}, {swap.before:g} -> {swap.after:g} bytes per element"
            if swap.width is not None:
                text += f", up to {swap.bytes_per_token:,.0f} bytes per token fewer"
            yield from ((name, text) for name in swap.names)

    def __str__(self) -> str:
        lines = [f"memkern.compress: {len(self.swapped)} modules swapped"]
        lines += _grouped(self._swaps())
        if self.swapped:
            lines.append(f"per token: {self.bytes_per_token:,.0f} bytes fewer at most, where the width is known")
        if self.marked:
            lines.append(f"{len(self.marked)} embeddings marked for 32-bit optimizer states")
            lines += _grouped((name, "marked") for name in self.marked)
        if self.left:
            lines.append("left alone")
            lines += _grouped((name, f"{left.what}, {left.reason}") for left in self.left for name in left.names)
        return "\n".join(lines)
