"""A device's streams and events without a device, which finds accesses to memory that no event orders.

:class:`Streams` has what copies of weights use of torch.cuda. Work of a stream is done when it is given, and every
access to memory is noted with the stream's vector clock. Two accesses of which one writes must be ordered by events, or
by what the host has seen to be complete; else RaceError. Who uses it notes frees itself, as accesses.
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
    stream: str
    time: int
    writes: bool
    what: str


class Event:
    def __init__(self, streams: Streams, clock: dict[str, int]) -> None:
        self.streams, self.clock = streams, clock

    def query(self) -> bool:
        """True at every ``late``-th query only, as if the device were late."""
        self.streams.queries += 1
        if self.streams.queries % self.streams.late:
            return False
        self.streams.join("host", self.clock)
        return True

    def synchronize(self) -> None:
        raise AssertionError("the host waits for the device")


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        self.streams.log.append((self.name, "waits"))
        self.streams.join(self.name, event.clock)

    def record_event(self) -> Event:
        return Event(self.streams, dict(self.streams.clocks[self.name]))


class Streams:
    """A stand-in for torch.cuda. Every ``late``-th query, counted over all events, finds its event complete."""

    def __init__(self, late: int = 3) -> None:
        self.clocks: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.log: list[tuple[str, str]] = []
        self.names = iter(("down", "up"))  # of the streams that memkern makes, in the order in which it makes them
        self.compute = Stream(self, "compute")
        self.now = self.compute
        self.queries, self.late = 0, late  # queries of all events
        self.history: dict[Any, list[Access]] = defaultdict(list)

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
        """Adds what ``clock`` knows of other streams to a stream's clock."""
        known = self.clocks[name]
        for other, time in clock.items():
            known[other] = max(known[other], time)

    def access(self, places: list[Any], writes: bool, what: str, stream: Stream | None = None) -> None:
        """Work of a stream, by default the current one, that reads or writes places: any hashable names of memory."""
        name = (stream or self.now).name
        self.join(name, self.clocks["host"])  # the host gives work after what it has seen to be complete
        clock = self.clocks[name]
        clock[name] += 1
        new = Access(name, clock[name], writes, what)
        for place in places:
            history = self.history[place]
            for old in history:
                if (writes or old.writes) and clock[old.stream] < old.time:
                    raise RaceError(f"{what} of {name}, and before it {old.what} of {old.stream}")
            self.history[place] = [new] if writes else [*(a for a in history if a.stream != name), new]
