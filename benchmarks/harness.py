"""Measures a case: contenders are set up once, then take turns in random orders; medians are reported.

Before every timed call a large tensor is copied, which evicts the caches as a forward and a backward pass would. The
copies' own time gives the copy bandwidth of the same minutes: on a shared machine it doubles and halves within hours,
so that a time alone cannot be compared with another hour's. A share of copy bandwidth above 100 % is possible: a copy
also reads the cache lines that it overwrites, and that is not counted; an update in place reads them anyway.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.metadata
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import machine

WARMUP = 2  # the first call allocates the state and may compile; the second gives the time of a call
MIN_ROUNDS = 5
COPIES_AHEAD = 4  # copies queued before a call on a device, so that its kernels are in the queue when the copies end
HOST_CALLS = 20  # calls of which Clock.host_time takes the median
BUSY_CALLS = 20  # calls queued before nvidia-smi reads the frequency


@dataclass
class Subject:
    """A contender that is set up: the call to time, and its bytes."""

    step: Callable[[], object]
    moved_bytes: Callable[[], int]  # the least bytes that one call reads and writes
    state_bytes: Callable[[], int] | None = None  # the bytes of an optimizer's states, or saved for the backward pass


@dataclass(frozen=True)
class Contender:
    """What is measured in a case."""

    name: str  # the package's import name in any case (its version is looked up), then what of it is measured
    setup: Callable[[], Subject]  # raises where the contender cannot run


@dataclass(frozen=True)
class Case:
    name: str
    numel: int  # the number of parameters or elements
    contenders: list[Contender]  # the first is memkern's, to which the others' times are compared


@dataclass
class Result:
    """Figures of one contender, per parameter or element; all None where it cannot run, for the reason in the note."""

    case: str
    contender: str
    peer: str = ""
    numel: int = 0
    rounds: int | None = None
    ms_median: float | None = None
    ms_p20: float | None = None
    ms_p80: float | None = None
    ns_per_param: float | None = None
    bytes_per_param: float | None = None
    copy_rate_gbps: float | None = None
    copy_share: float | None = None
    state_bytes_per_param: float | None = None
    temp_bytes_per_param: float | None = None
    ratio_to_memkern: float | None = None
    note: str = ""


class Clock:
    """Times calls, each after a copy larger than any cache; `copies` are the copies' own seconds."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.source = torch.ones(2**28 if self.cuda else 2**25, device=device)
        self.target = torch.zeros_like(self.source)
        self.copies: list[float] = []

    def time(self, call: Callable[[], object]) -> float:
        return self._on_device(call) if self.cuda else self._on_host(call)

    def _on_host(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        self.target.copy_(self.source)
        middle = time.perf_counter()
        call()
        end = time.perf_counter()
        self.copies.append(middle - start)
        return end - middle

    def _on_device(self, call: Callable[[], object]) -> float:
        """The device's time alone, if the host has queued the call before the copies end (2 ms on an H200)."""
        for _ in range(COPIES_AHEAD - 1):
            self.target.copy_(self.source)
        start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        start.record()
        self.target.copy_(self.source)
        middle.record()
        call()
        end.record()
        end.synchronize()
        self.copies.append(start.elapsed_time(middle) / 1e3)
        return middle.elapsed_time(end) / 1e3

    def host_time(self, call: Callable[[], object]) -> float:
        """Seconds until a call returns on an idle device; the median of HOST_CALLS."""
        times = []
        for _ in range(HOST_CALLS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        return statistics.median(times)

    def of_multiprocessors(self, call: Callable[[], object]) -> str:
        """The multiprocessors' frequency while a call runs again and again, such as "1980 MHz"."""
        for _ in range(BUSY_CALLS):
            call()
        return machine.gpu_field("clocks.sm")

    def copy_rate(self) -> float:
        """Bytes read and written per second, in GB/s; the median over all copies since the last reset."""
        return 2 * self.source.nbytes / statistics.median(self.copies) / 1e9


def take_turns(
    calls: dict[str, Callable[[], object]],
    time_call: Callable[[Callable[[], object]], float],
    rounds: int,
    every: dict[str, int],
    after_round: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each call. A round calls each once; a slow one is called in every ``every[name]``-th round only.

    Rounds have random orders, the same in every run. In a fixed order a contender would always follow the same other
    one, and find caches and heap as that one leaves them, which changes times by 2 to 3 % for 148 tensors.
    """
    orders = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name in orders.sample([*calls], len(calls)):
            if i % every[name] == 0:
                times[name].append(time_call(calls[name]))
        after_round()
    return times


def largest_temporary(call: Callable[[], object], device: str) -> int:
    """Peak of tensor bytes during one call, above the bytes allocated before it.

    On the CPU, torch's profiler records each allocation of torch's allocator, inside operators too. What a library
    takes from malloc directly is not counted.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _all_threads_counted(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    roots = profile.profiler.kineto_results.experimental_event_tree()
    changes = sorted((t, fields.total_allocated, fields.alloc_size) for t, fields in _allocations(roots))
    if not changes:
        return 0
    before = changes[0][1] - changes[0][2]
    return max(0, *(total - before for _, total, _ in changes))


@contextlib.contextmanager
def _all_threads_counted() -> Iterator[None]:
    """A scope in which the allocator's total counts frees in threads that the profiler does not record, such as gloo's.

    Where such a thread holds the last reference to a collective's buffer, the profiler records the allocation and not
    the free, and the sum of its events grows by a buffer each time.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    flag = ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
    before, flag.value = flag.value, True
    try:
        yield
    finally:
        flag.value = before


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """The time and the fields of each allocation and free, among the profiler's events and the events in these."""
    pending = list(events)
    while pending:
        event = pending.pop()
        pending += event.children
        if event.name == "[memory]":
            yield event.start_time_ns, event.extra_fields


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Hides the output of peers and of the compilers that they start: redirects descriptors 1 and 2."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for fd, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, fd)
                os.close(copy)


@dataclass
class _Entry:
    """A contender that is set up and warm."""

    subject: Subject
    seconds: float  # the time of the second call
    note: str


def _version(contender: str) -> str:
    name = contender.split()[0].lower()
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:  # imported from its sources
        return f"{name} {importlib.import_module(name).__version__}"


def _set_up(contender: Contender) -> _Entry:
    subject = contender.setup()
    seconds = []
    for _ in range(WARMUP):
        start = time.perf_counter()
        subject.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    first, last = seconds[0], seconds[-1]
    note = f"first step {first:.0f} s, not counted" if first > max(2, 10 * last) else ""
    return _Entry(subject, last, note)


def _reason(error: Exception) -> str:
    """An exception in one line."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"absent: {type(error).__name__}: {first_line[:200]}"


def measure(
    case: Case,
    clock: Clock,
    *,
    rounds: int = 30,
    seconds: float = 2.0,
    progress: Callable[[str], object] = lambda activity: None,
) -> list[Result]:
    """One Result per contender, in order. A slow one takes about `seconds`, but at least MIN_ROUNDS rounds.

    progress(what) is called once per contender set up, and once per round.
    """
    device = clock.source.device.type
    results = {c.name: Result(case.name, c.name, numel=case.numel) for c in case.contenders}
    entries: dict[str, _Entry] = {}
    for contender in case.contenders:
        progress(contender.name)
        try:
            with muted():
                entries[contender.name] = _set_up(contender)
        except Exception as error:  # a peer that cannot run, for whatever reason, becomes a row that says so
            results[contender.name].note = _reason(error)
    gc.collect()

    def rounds_between(entry: _Entry) -> int:
        affordable = max(MIN_ROUNDS, int(seconds / max(entry.seconds, 1e-9)))
        return max(1, math.ceil(rounds / affordable))

    clock.copies.clear()
    calls = {name: entry.subject.step for name, entry in entries.items()}
    every = {name: rounds_between(entry) for name, entry in entries.items()}
    times = take_turns(calls, clock.time, rounds, every, lambda: progress("measuring"))
    copy_rate = clock.copy_rate() if clock.copies else None
    for name, entry in entries.items():
        with muted():
            temporary = largest_temporary(entry.subject.step, device)
            if device == "cuda":
                host = f"host {1e6 * clock.host_time(entry.subject.step):.0f} us a call"
                frequency = f"multiprocessors at {clock.of_multiprocessors(entry.subject.step)}"
                entry.note = "; ".join(filter(None, [entry.note, host, frequency]))
        _fill(results[name], entry, times[name], temporary, copy_rate)
    reference = results[case.contenders[0].name].ms_median
    for result in results.values():
        result.copy_rate_gbps = copy_rate
        if reference and result.ms_median:
            result.ratio_to_memkern = result.ms_median / reference
    return list(results.values())


def _fill(result: Result, entry: _Entry, times: list[float], temporary: int, copy_rate: float | None) -> None:
    cuts = statistics.quantiles(times, n=5, method="inclusive")
    median = statistics.median(times)
    state = entry.subject.state_bytes() if entry.subject.state_bytes else None
    moved = entry.subject.moved_bytes()
    result.peer = _version(result.contender)
    result.rounds = len(times)
    result.ms_median, result.ms_p20, result.ms_p80 = (1e3 * t for t in (median, cuts[0], cuts[-1]))
    result.ns_per_param = 1e9 * median / result.numel
    result.bytes_per_param = moved / result.numel
    result.copy_share = moved / median / 1e9 / copy_rate if copy_rate else None
    result.state_bytes_per_param = None if state is None else state / result.numel
    result.temp_bytes_per_param = temporary / result.numel
    result.note = entry.note
