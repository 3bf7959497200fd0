"""The order in which ranks exchange what belongs to their shards, which must be one order on all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from operator import itemgetter
from typing import Any, TypeVar

from torch import Tensor

from .shards import Ranks, is_dtensor, ranks_of

T = TypeVar("T")


class Order:
    """The order of an optimizer's DTensors: by name where its groups have names, else the groups' own.

    Nothing else tells shards of one shape apart on several ranks.
    """

    def __init__(self, groups: Iterable[dict[str, Any]] = ()) -> None:
        named: list[tuple[str, Tensor]] = []
        for group in groups:
            params, names = group["params"], group.get("param_names", ())
            if len(names) != len(params):  # there are none, or the list was edited without them
                names = [""] * len(params)
            named += [(name, p) for name, p in zip(names, params, strict=True) if is_dtensor(p)]
        named.sort(key=itemgetter(0))
        self._places = {id(p): i for i, (_, p) in enumerate(named)}
        self._listed: dict[Ranks, list[str]] = {}
        for name, p in named:
            if (ranks := ranks_of(p)) is not None:
                placements: Any = p.placements  # type: ignore[attr-defined]
                self._listed.setdefault(ranks, []).append(
                    f"{name} {tuple(p.shape)} {[*map(str, placements)]} {p.dtype}".strip()
                )
        self.is_checked = False

    def sorted(self, pairs: Iterable[tuple[Tensor, T]]) -> list[tuple[Tensor, T]]:
        """Parameters, each with something of it, in this order; plain tensors come first, in their own order."""
        return sorted(pairs, key=lambda pair: self._places.get(id(pair[0]), -1)) if self._places else [*pairs]

    def fingerprints(self) -> dict[Ranks, float]:
        """A hash of the tensors' names, shapes, placements and dtypes in this order, by the ranks that have parts.

        48 bits, so that reductions in fp64 compare it exactly.
        """
        return {
            ranks: float(int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:6], "big"))
            for ranks, lines in self._listed.items()
        }

    def __str__(self) -> str:
        lines = [line for of_ranks in self._listed.values() for line in of_ranks]
        return "; ".join(lines[:4]) + ("; ..." if len(lines) > 4 else "")
