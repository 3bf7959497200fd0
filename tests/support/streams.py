"""A device's streams and events without a device, which finds accesses to memory that no event orders.

:class:`Streams` has what ``StreamCopies`` uses of torch.cuda. Work of a stream is done when it is given, and every
access to memory is noted with the stream's vector clock. Two accesses of which one writes must be ordered by events, or
by what the host has seen to be complete; else RaceError. A tensor's memory is written, by the computing stream, when
the tensor is freed: torch's allocator gives it to what that stream does next.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memkern.saved.copies import Pairs, StreamCopies
from memkern.saved.link import Away, Link
from memkern.saved.records import BACK, EARLY, HELD, Record

UNIT = 512  # bytes of the host's memory that have a history of their own


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
        """Complete after it was asked about several times, as if the device were late."""
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
    """In place of torch.cuda. late: of how many questions whether an event is complete one is answered with yes."""

    def __init__(self, late: int = 3) -> None:
        self.clocks: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.log: list[tuple[str, str]] = []
        self.names = iter(("down", "up"))
        self.compute = Stream(self, "compute")
        self.now = self.compute
        self.queries, self.late = 0, late
        self.history: dict[Any, list[Access]] = defaultdict(list)
        self.errors: list[RaceError] = []  # of frees, which happen where nothing can be raised

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
        own = self.clocks[name]
        for other, time in clock.items():
            own[other] = max(own[other], time)

    def access(self, places: list[Any], writes: bool, what: str, stream: Stream | None = None) -> None:
        """Work of a stream, by default the current one, that reads or writes places."""
        name = (stream or self.now).name
        self.join(name, self.clocks["host"])
        clock = self.clocks[name]
        clock[name] += 1
        new = Access(name, clock[name], writes, what)
        for place in places:
            history = self.history[place]
            for old in history:
                if (writes or old.writes) and clock[old.stream] < old.time:
                    raise RaceError(f"{what} of {name}, and before it {old.what} of {old.stream}")
            self.history[place] = [new] if writes else [*(a for a in history if a.stream != name), new]

    # ---- memory

    def device_memory(self, x: Tensor) -> list[Any]:
        """The place of a device's tensor, whose free is noted."""
        storage = x.untyped_storage()
        place = ("device", storage._cdata)
        if place not in self.history:
            self.history[place] = []
            weakref.finalize(storage, self._freed, place)
        return [place]

    def _freed(self, place: Any) -> None:
        try:
            self.access([place], True, "a free", self.compute)
        except RaceError as error:
            self.errors.append(error)
        self.history.pop(place, None)


class WatchedCopies(StreamCopies):
    """StreamCopies on :class:`Streams`, with every access noted."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        super().__init__(torch.device("cpu"), streams)

    def slab(self, size: int) -> Tensor:
        return torch.full((size,), 0xA5, dtype=torch.uint8)

    def is_host(self, x: Tensor) -> bool:
        return any(x.untyped_storage()._cdata == s.untyped_storage()._cdata for s in self.link.pool.slabs.values())

    def places(self, x: Tensor) -> list[Any]:
        if not self.is_host(x):
            return self.streams.device_memory(x)
        first = x.storage_offset() * x.element_size()
        last = first + x.nbytes - 1
        slab = x.untyped_storage()._cdata
        return [("host", slab, unit) for unit in range(first // UNIT, last // UNIT + 1)]

    def _copy(self, pairs: Pairs) -> None:  # type: ignore[override]
        for to, x in pairs:
            way = self.streams.now.name
            self.streams.access(self.places(x), False, f"a copy {way} reads")
            self.streams.access(self.places(to), True, f"a copy {way} writes")
            to.copy_(x)


class WatchedLink(Link):
    """A link whose tensors the computing stream writes before they are put and reads when they are taken.

    log: ("put", "down", "up" or "take", the record's number). most_early: most bytes that had come back and were not
    asked for. most: most bytes on the device.
    """

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        copies = WatchedCopies(streams)
        super().__init__(torch.device("cpu"), copies)
        copies.link = self
        self.log: list[tuple[str, int]] = []
        self.numbers: dict[Record, int] = {}
        self.held_numbers: set[int] = set()  # of what somebody else held when it was to leave
        self.most_early = self.most_on_device = self.missed = 0

    def put(self, data: Any, options: Any) -> Any:
        for x in data:
            self.streams.access(self.streams.device_memory(x), True, "an operation writes")
        found = super().put(data, options)
        if isinstance(found, Away):
            self.number(found.record)
        return found

    def _find_host_memory(self, record: Record, leave: list[Record]) -> None:
        number = self.number(record)
        super()._find_host_memory(record, leave)
        if leave and leave[-1] is record:
            self.log.append(("down", number))
        else:
            self.held_numbers.add(number)

    def _send(self, ahead: int) -> None:
        super()._send(ahead)
        self._count()

    def _fetch(self, records: list[Record]) -> None:
        self.log += [("up", self.number(record)) for record in records]
        super()._fetch(records)
        self._count()

    def take(self, record: Record) -> Any:
        self.missed += record.tensors is None
        self.log.append(("take", self.number(record)))
        found = super().take(record)
        for x in found:
            self.streams.access(self.streams.device_memory(x), False, "an operation reads")
        return found

    def number(self, record: Record) -> int:
        return self.numbers.setdefault(record, len(self.numbers))

    def _count(self) -> None:
        there = [r for r in self.stack if r.alive and r.tensors is not None]
        early = sum(r.nbytes for r in there if r.state == EARLY)
        self.most_early = max(self.most_early, early)
        on_device = [r for r in there if r.state not in (HELD, BACK)]
        on_device += [r for transfer in self.leaving for r in transfer.records if not r.alive]
        self.most_on_device = max(self.most_on_device, sum(r.nbytes for r in on_device))
