"""What a node of the graph has saved, looked at without computing it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from .saved_value import Number, Value


class _Peeking(threading.local):
    """found: what was asked for, while it is only noted; else None. Of each thread."""

    found: list[Any] | None = None


local = _Peeking()


@contextlib.contextmanager
def peeking() -> Iterator[list[Any]]:
    """Inside, what autograd asks the unpack hook for is noted and not computed."""
    found: list[Any] = []
    local.found = found
    try:
        yield found
    finally:
        local.found = None


def peeked(packed: Any) -> bool:
    """For the unpack hook: notes what autograd holds and says True if it is only to be noted."""
    found = local.found
    if found is None:
        return False
    found.append(packed)
    return True


def saved_by(node: Any, attribute: str) -> list[Value] | None:
    """The values of what a node has saved; [] where that is None, None where it is freed or unknown."""
    found: list[Any] = []
    local.found = found  # as peeking() does, in a third of the time
    try:
        shown = getattr(node, attribute)
    except (RuntimeError, AttributeError):  # freed, or another version of torch
        return None
    finally:
        local.found = None
    if shown is None or found:
        return [packed.value for packed in found]
    # Autograd packs no numbers.
    return [Number(shown)] if isinstance(shown, Tensor) and shown.dim() == 0 else None


def packed_by(node: Any, attribute: str) -> list[Any]:
    """The objects that autograd holds in place of a node's saved tensors; [] where that is None."""
    with peeking() as found:
        getattr(node, attribute)
    return found
