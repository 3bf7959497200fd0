"""Memory by the phases of a training step: begin, forward, backward, step, end."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from pathlib import Path
from types import TracebackType

import torch

PHASES = ("begin", "forward", "backward", "step", "end")
SAMPLES = 2000  # points of a curve; up to twice as many are kept

_STATM = Path("/proc/self/statm")
_STATUS = Path("/proc/self/status")


def resident_bytes() -> int | None:
    """The process's resident set; None where the system has no /proc."""
    try:
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def peak_resident_bytes() -> int | None:
    """The largest resident set so far, by the kernel's own count."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


@dataclasses.dataclass
class Row:
    """Bytes at the end of a phase in the first and in the last step, and the peak within the phase."""

    first: int | None = None
    last: int | None = None
    peak: int = 0


class Phases:
    """Notes the memory at the end of each phase, and its peak in between.

    CPU: the process's resident set, sampled by a thread every ``interval`` seconds. CUDA: the caching allocator's
    allocated bytes, whose peak statistics are reset at each phase. ``curve`` has (seconds, bytes).
    """

    def __init__(self, device: torch.device, interval: float = 0.01) -> None:
        self.device = device
        self.interval = interval
        self.table = {phase: Row() for phase in PHASES}
        self.curve: list[tuple[float, int]] = []
        self.width = 0.0  # seconds between the curve's points
        self.highest = 0  # since the last mark
        self.began = time.perf_counter()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._sample, name="memkern-phases", daemon=True)

    def __enter__(self) -> Phases:
        if self.now() is not None:
            self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop.set()
        if self.thread.is_alive():
            self.thread.join()

    def now(self) -> int | None:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else resident_bytes()

    def _sample(self) -> None:
        while not self.stop.wait(self.interval):
            value = self.now()
            if value is not None:
                self.highest = max(self.highest, value)
                self._add(time.perf_counter() - self.began, value)

    def _add(self, seconds: float, value: int) -> None:
        """Appends to the curve, or raises its last point where that is less than ``width`` seconds ago."""
        if self.curve and seconds - self.curve[-1][0] < self.width:
            if value > self.curve[-1][1]:
                self.curve[-1] = (self.curve[-1][0], value)
            return
        self.curve.append((seconds, value))
        if len(self.curve) >= 2 * SAMPLES:
            pairs = zip(self.curve[::2], self.curve[1::2], strict=False)
            self.curve = [(first[0], max(first[1], second[1])) for first, second in pairs]
            self.width = 2 * max(self.width, self.interval)

    def mark(self, phase: str) -> None:
        """Notes the end of a phase."""
        value = self.now()
        if value is None:
            return
        if self.device.type == "cuda":
            highest = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            highest, self.highest = self.highest, value
        row = self.table[phase]
        row.peak = max(row.peak, highest, value)
        row.last = value
        if row.first is None:
            row.first = value

    @property
    def peak(self) -> int | None:
        """The peak of the whole process on the CPU, of the phases on CUDA."""
        seen = max(row.peak for row in self.table.values())
        if self.device.type == "cuda":
            return seen
        peak = peak_resident_bytes()
        return None if peak is None else max(peak, seen)  # the kernel's count of the peak lags a few pages behind
