"""When a node of the autograd graph was built, as far as what it has saved tells.

Sequence numbers do not tell: every thread counts its own, and a graph may hold nodes of several threads. What a node
has saved through the hooks of a session carries the time at which it was packed, and a node is younger than its inputs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

from torch.autograd.function import BackwardCFunction

from .peek import peeking
from .users import is_leaf

_MOST_NODES = 16
_BUILT = "memkern built"
_clock = itertools.count()


def now() -> int:
    """A later one at each call, on whatever thread."""
    return next(_clock)


@functools.cache
def _attributes(kind: type) -> tuple[str, ...]:
    if issubclass(kind, BackwardCFunction):
        return ("saved_tensors",)
    return tuple(name for name in dir(kind) if name.startswith("_saved_"))


def _times(node: Any) -> Iterator[int]:
    if (known := node.metadata.get(_BUILT)) is not None:
        yield known
    for attribute in _attributes(type(node)):  # type: ignore[arg-type]
        with peeking() as found:
            try:
                getattr(node, attribute)
            except (RuntimeError, AttributeError):  # freed
                continue
        yield from (packed.time for packed in found)


def note_built(node: Any) -> None:
    """Notes that a node has just been built."""
    node.metadata[_BUILT] = now()


def is_built_since(node: Any, time: int) -> bool:
    """Whether a node was certainly built at ``time`` or later: it, or one of the nodes before it, packed a tensor then.

    So many nodes are asked at most; of others nothing is known.
    """
    nodes = [node]
    for i in range(_MOST_NODES):
        if i == len(nodes):
            break
        if any(then >= time for then in _times(nodes[i])):
            return True
        nodes += (source for source, _ in nodes[i].next_functions if source is not None and not is_leaf(source))
    return False
