"""Versions and memory of parameters and other leaves, and when they were read.

An operation such as x + p saves neither x nor p. Its result can be recomputed only if p still has the value that the
operation used. A version that is read after the operation may already belong to another value, and so may memory that
``p.data = ...`` has exchanged, which changes no version.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from .built import is_built_since, now
from .storage import is_plain, is_present


class Leaves(threading.local):
    """By id of the leaf: a weak reference, version, storage, and when they were read first."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[weakref.ref, int, weakref.ref, int]] = {}

    def note(self, leaf: Tensor) -> None:
        """Notes the current version and storage."""
        if not is_plain(leaf):
            return
        known, version, storage = self.known.get(id(leaf)), leaf._version, leaf.untyped_storage()
        if known is None or known[0]() is not leaf or known[1] != version or known[2]() is not storage:
            self.known[id(leaf)] = weakref.ref(leaf), version, weakref.ref(storage), now()

    def note_all(self, more: Iterable[Tensor] = ()) -> None:
        """Notes the current versions of all known leaves and of ``more``, before the next operation."""
        alive = [leaf for known in self.known.values() if (leaf := known[0]()) is not None]
        if len(alive) < len(self.known):
            ids = {id(leaf) for leaf in alive}
            self.known = {key: known for key, known in self.known.items() if key in ids}
        for leaf in (*alive, *more):
            self.note(leaf)

    def unchanged_since(self, leaf: Tensor, node: Any) -> bool:
        """Whether the leaf certainly has the value that it had when ``node`` was built."""
        known = self.known.get(id(leaf))
        return (
            known is not None
            and known[0]() is leaf
            and known[1] == leaf._version
            and known[2]() is leaf.untyped_storage()
            and is_present(leaf)
            and is_built_since(node, known[3])
        )


def parameters_of(module: nn.Module) -> Iterator[Tensor]:
    """Those of module.parameters(), a shared one as often as it is met: in a third of the time, at every call."""
    yield from (p for p in module._parameters.values() if p is not None)
    for child in module._modules.values():
        if child is not None:
            yield from parameters_of(child)


leaves = Leaves()
