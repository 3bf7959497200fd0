"""Simulates a device's streams and events on the CPU, and finds races: accesses to memory that no event orders.

:class:`Streams` stands in for torch.cuda, with what copies of weights use of it. A stream's work is done at once. Each
access to memory is noted with the stream's vector clock: for each stream, how many of its accesses are known to come
before. Two accesses to one place, of which one writes, must be ordered by events, or by an event that the host has seen
to be complete. Otherwise :meth:`Streams.access` raises RaceError. A test calls it for every read, write and free.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class RaceError(AssertionError):
    """Two accesses that may come in either order."""


class Access(NamedTuple):
    """An access of a stream to memory."""

    stream: str  # the stream's name
    time: int  # the number of this access among the accesses of the stream
    writes: bool
    what: str  # a description for RaceError


class Event:
    """An event with the vector clock of its stream when it was recorded."""

    def __init__(self, streams: Streams, clock: dict[str, int]) -> None:
        self.streams, self.clock = streams, clock

    def synchronize(self) -> None:
        """The host waits for the event."""
        self.streams.join("host", self.clock)


class Stream:
    """A stream, by its name."""

    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        self.streams.join(self.name, event.clock)

    def record_event(self) -> Event:
        return Event(self.streams, dict(self.streams.clocks[self.name]))


class Streams:
    """A stand-in for torch.cuda."""

    def __init__(self) -> None:
        self.clocks: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))  # vector clocks, by stream
        self.names = iter(("down", "up"))  # names for the streams that memkern makes, in that order
        self.compute = Stream(self, "compute")
        self.now = self.compute  # the current stream
        self.history: dict[Any, list[Access]] = defaultdict(list)  # by place: the last write, and the reads after it

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self, next(self.names))

    def current_stream(self, device: torch.device) -> Stream:
        return self.now

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def join(self, name: str, clock: dict[str, int]) -> None:
        """Lets a stream (or the host) know of all accesses that ``clock`` knows of."""
        known = self.clocks[name]
        for other, time in clock.items():
            known[other] = max(known[other], time)

    def access(self, places: list[Any], writes: bool, what: str, stream: Stream | None = None) -> None:
        """Notes that a stream, by default the current one, reads or writes places: any hashable names of memory.

        Raises:
            RaceError: another access to one of them may come before or after this one.
        """
        name = (stream or self.now).name
        self.join(name, self.clocks["host"])  # what the host has waited for comes before the work that it gives
        clock = self.clocks[name]
        clock[name] += 1
        new = Access(name, clock[name], writes, what)
        for place in places:
            history = self.history[place]
            for old in history:
                if (writes or old.writes) and clock[old.stream] < old.time:
                    raise RaceError(f"{what} of {name}, and before it {old.what} of {old.stream}")
            self.history[place] = [new] if writes else [*(a for a in history if a.stream != name), new]
