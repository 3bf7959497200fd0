"""If no step fits: the changes that would make one fit, and the memory needed with each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .choice import Chooser
from .hardware import Hardware
from .prediction import BAND, Change, Predictor

SHORTEST = 64  # tokens of a sequence: shorter ones are not proposed
TOGETHER = (
    ("micro_batch", "accumulation"),
    ("precision", "master_weights"),
    ("checkpointing", "checkpoint_bits", "checkpoint_every"),
)
"""Techniques that are left to the planner in pairs, as one depends on the other."""


@dataclasses.dataclass
class Asked:
    """The arguments of :func:`memkern.plan`."""

    predictor: Predictor
    given: Mapping[str, Any]
    batch_size: int
    clip: float
    hardware: Hardware
    host_memory: int | None = None

    def chooser(self) -> Chooser:
        return Chooser(self.predictor, self.given, self.batch_size, self.clip, self.host_memory)

    def needs(self) -> int:
        """Bytes that the smallest step fits in."""
        band = BAND[self.predictor.counted_on][0]
        return math.ceil(self.chooser().smallest().peak * (1 + band))

    def with_batch(self, size: int) -> Asked:
        """The same with fewer sequences in a forward pass."""
        if "micro_batch" not in self.given:
            return dataclasses.replace(self, batch_size=size)
        micro_batches = self.given.get("accumulation", 1)
        given = {**self.given, "micro_batch": size}
        return dataclasses.replace(self, given=given, batch_size=size * micro_batches)

    def with_seq_len(self, tokens: int) -> Asked:
        old = self.predictor
        source = dataclasses.replace(old.source, seq_len=tokens)
        return dataclasses.replace(
            self, predictor=Predictor(source, old.device, old.counted_on, self.hardware, old.devices)
        )

    def without(self, names: tuple[str, ...]) -> Asked:
        """The same with these techniques left to the planner."""
        kept = {name: value for name, value in self.given.items() if name not in names}
        return dataclasses.replace(self, given=kept)


def would_fit(asked: Asked, memory: int) -> list[Change]:
    """The smallest change of each argument that fits by itself.

    If none does: the smallest value of each argument, and last, named "all of these", all of them together.
    """
    found = list(_alone(asked, memory))
    fitting = [change for change in found if change.memory <= memory]
    if fitting or len(found) < 2:
        return fitting or found
    for change in found:
        asked = _changed(asked, change)
    return [*found, Change("all of these", None, asked.needs())]


def _alone(asked: Asked, memory: int) -> Iterator[Change]:
    from .models import Configured

    size = asked.given.get("micro_batch", asked.batch_size)
    source = asked.predictor.source
    yield from _halved("batch_size", size, 1, asked.with_batch, memory)
    if isinstance(source, Configured) and not source.takes_images:
        yield from _halved("seq_len", source.seq_len, SHORTEST, asked.with_seq_len, memory)
    if asked.clip:
        yield Change("clip", 0, dataclasses.replace(asked, clip=0.0).needs())
    before = asked.needs()
    for names in dict.fromkeys(_pair(name) for name in asked.given if name != "optimizer"):
        freed = asked.without(names)
        techniques, needs = freed.chooser().smallest().techniques, freed.needs()
        other = [n for n in names if n in asked.given and getattr(techniques, n) != asked.given[n]]
        if other and needs < before:
            yield Change(other[0], getattr(techniques, other[0]), needs)


def _pair(name: str) -> tuple[str, ...]:
    """The techniques that are left to the planner together with this one."""
    return next((names for names in TOGETHER if name in names), (name,))


def _halved(name: str, before: int, least: int, changed: Callable[[int], Asked], memory: int) -> Iterator[Change]:
    """Yields the largest half, quarter, ... of an argument that fits; where none fits, the smallest."""
    value = before
    change = None
    while value // 2 >= least:
        value //= 2
        change = Change(name, value, changed(value).needs())
        if change.memory <= memory:
            break
    if change is not None:
        yield change


def _changed(asked: Asked, change: Change) -> Asked:
    if change.name == "batch_size":
        return asked.with_batch(change.value)
    if change.name == "seq_len":
        return asked.with_seq_len(change.value)
    if change.name == "clip":
        return dataclasses.replace(asked, clip=0.0)
    return asked.without(_pair(change.name))
