"""Shortens loops over pieces of a tensor on the planner's fake tensors, where few iterations tell the memory of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

T = TypeVar("T")


def few_iterations(pieces: Sequence[T], x: Tensor) -> Sequence[T]:
    """The pieces of a loop over parts of ``x``; the first two and the last two where ``x`` is a fake tensor of the
    planner (:class:`memkern.planner.fake_mode.FakeMode`), whose values nobody reads.

    All iterations but the last must allocate and free the same bytes. The second one begins while variables still hold
    tensors of the first, as each later one does; the last piece may be smaller, and comes after a full one. A loop must
    keep no tensor that it makes in an iteration: those of the iterations that are left out would not be counted.
    """
    if len(pieces) > 4 and isinstance(x, FakeTensor) and getattr(x.fake_mode, "shortens_loops", False):
        return [*pieces[:2], *pieces[-2:]]
    return pieces
