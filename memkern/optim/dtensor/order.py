"""Orders an optimizer's DTensors, in the same way on all ranks, which exchange parts of their shards in that order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, TypeVar

from torch import Tensor

from ..step_errors import names_of
from .shards import Ranks, is_dtensor, ranks_of

T = TypeVar("T")


class Order:
    """The order of an optimizer's DTensors: by name where its groups have names, else the groups' own.

    Shards of one shape on several ranks have nothing else that tells them apart.
    """

    def __init__(self, groups: Sequence[dict[str, Any]] = ()) -> None:
        params = [p for group in groups for p in group["params"]]
        named = [(name or "", p) for name, p in zip(names_of(groups), params, strict=True) if is_dtensor(p)]
        named.sort(key=itemgetter(0))
        self._places = {id(p): i for i, (_, p) in enumerate(named)}
        self._descriptions: dict[Ranks, list[str]] = {}  # of the tensors that these ranks have parts of
        for name, p in named:
            if (ranks := ranks_of(p)) is not None:
                placements: Any = p.placements
                self._descriptions.setdefault(ranks, []).append(
                    f"{name} {tuple(p.shape)} {[*map(str, placements)]} {p.dtype}".strip()
                )
        self.checked: set[Ranks] = set()  # ranks among which collectives.check_order has compared it

    def sorted(self, pairs: Iterable[tuple[Tensor, T]]) -> list[tuple[Tensor, T]]:
        """Pairs of a parameter and anything else, in this order; plain tensors come first, in their own order."""
        return sorted(pairs, key=lambda pair: self._places.get(id(pair[0]), -1)) if self._places else [*pairs]

    def fingerprints(self) -> dict[Ranks, float]:
        """By the ranks that have parts, a hash of their tensors' names, shapes, placements and dtypes in this order.

        48 bits, so that reductions in fp64 compare it exactly.
        """
        return {
            ranks: float(int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:6], "big"))
            for ranks, lines in self._descriptions.items()
        }

    def __str__(self) -> str:
        lines = [line for descriptions in self._descriptions.values() for line in descriptions]
        return "; ".join(lines[:4]) + ("; ..." if len(lines) > 4 else "")
