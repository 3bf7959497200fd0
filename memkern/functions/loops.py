"""Shortens loops of like iterations on the planner's fake tensors, for which the bytes of a few tell those of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

T = TypeVar("T")


def few_iterations(pieces: Sequence[T], x: Tensor) -> Sequence[T]:
    """The pieces of a loop over parts of ``x``; the first two and the last two where ``x`` is a fake tensor of the
    planner (:class:`memkern.planner.fake_mode.FakeMode`), whose values nobody reads.

    For loops that keep no tensor of an iteration.
    """
    if len(pieces) > 4 and isinstance(x, FakeTensor) and getattr(x.fake_mode, "shortens_loops", False):
        return [*pieces[:2], *pieces[-2:]]
    return pieces
