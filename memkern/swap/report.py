"""The report of ``memkern.compress``: what was swapped, and how many bytes that saves."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator

from .measure import Measured


@dataclasses.dataclass(frozen=True)
class Swap:
    """A module that saves less for the backward pass than before.

    names: where it is, once for each use. before, after: bytes saved per element (of a linear layer: of its input).
    width: elements per token, and the layer that says so; None where the structure does not tell.
    """

    names: tuple[str, ...]
    was: str
    now: str
    before: float
    after: float
    width: tuple[int, str] | None

    @property
    def bytes_per_token(self) -> float | None:
        """How many fewer, over all uses."""
        return None if self.width is None else (self.before - self.after) * self.width[0] * len(self.names)


@dataclasses.dataclass(frozen=True)
class Left:
    """A module that was left alone although it is, or calls, something that has a counterpart."""

    names: tuple[str, ...]
    what: str
    reason: str


def pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name) or "the model itself"


def _grouped(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """One line for all rows whose names differ in numbers only and whose texts are equal."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, text in rows:
        groups.setdefault((pattern(name), text), []).append(name)
    for (like, text), names in groups.items():
        count = f" ({len(names)} of them)" if len(names) > 1 else ""
        shown = like if count else names[0] or like  # the model itself has no name
        yield f"  {shown}{count}: {text}"


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of ``memkern.compress``; ``print`` shows it.

    saved: the modules around which ``saved_bits`` stands, and its value. offload: whether what it stores leaves the
    device. before, after: what was measured on the example, if there was one.
    """

    swapped: tuple[Swap, ...]
    left: tuple[Left, ...]
    marked: tuple[str, ...]
    saved: tuple[tuple[str, int | str | None], ...] = ()
    offload: bool = False
    before: Measured | None = None
    after: Measured | None = None

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
        if self.swapped and self.before is None:
            lines.append(
                f"per token: {self.bytes_per_token:,.0f} bytes fewer at most, where the width is known; "
                "compress(model, example=batch) measures"
            )
        for name, bits in self.saved:
            mode = "as torch does" if bits is None else "exactly" if bits == "exact" else f"in {bits} bits"
            place = ", on the host" if self.offload and bits is not None else ""
            lines.append(f"  {name or 'the model itself'}: what it saves is saved {mode}{place}")
        if self.before is not None and self.after is not None:
            lines += self._measured(self.before, self.after)
        if self.marked:
            lines.append(f"{len(self.marked)} embeddings marked for 32-bit optimizer states")
            lines += _grouped((name, "marked") for name in self.marked)
        if self.left:
            lines.append("left alone")
            lines += _grouped((name, f"{left.what}, {left.reason}") for left in self.left for name in left.names)
        return "\n".join(lines)

    @staticmethod
    def _measured(before: Measured, after: Measured) -> Iterator[str]:
        share = after.total / before.total if before.total else 1
        yield (
            f"measured on the example, alive with the graph: {before.total:,} bytes before, {after.total:,} after "
            f"({share:.1%}); by the first module that saves each tensor:"
        )
        names = dict.fromkeys((*before.modules, *after.modules))
        rows = [(name, before.modules.get(name, 0), after.modules.get(name, 0)) for name in names]
        yield from _grouped((name, f"{old:,} -> {new:,} bytes") for name, old, new in rows if old != new)
