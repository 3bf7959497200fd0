"""Memory by phase: what is noted at the end of each, and the peak in between."""

import time
from pathlib import Path

import pytest
import torch

from memkern.train import phases as module
from memkern.train.phases import PHASES, Phases

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The memory that the process is said to hold: the last element."""
    held = [100 * MIB]
    monkeypatch.setattr(module, "resident_bytes", lambda: held[-1])
    return held


def test_the_end_and_the_peak_of_each_phase(process: list[int]) -> None:
    with Phases(CPU, interval=0.001) as phases:
        for step in (1, 2):
            for number, phase in enumerate(PHASES):
                process.append((200 + 10 * number + step) * MIB)
                time.sleep(0.02)  # for the thread
                process.append((100 + 10 * number + step) * MIB)
                phases.mark(phase)
    for number, phase in enumerate(PHASES):
        row = phases.table[phase]
        assert (row.first, row.last) == ((101 + 10 * number) * MIB, (102 + 10 * number) * MIB)
        assert row.peak == (202 + 10 * number) * MIB
    assert max(value for _, value in phases.curve) == 242 * MIB
    assert not phases.thread.is_alive()


def test_a_long_curve_keeps_its_peaks(process: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLES", 10)
    phases = Phases(CPU)
    values = [(i * 7919) % 1000 for i in range(500)]
    for i, value in enumerate(values):
        phases._add(i * phases.interval, value)
    assert len(phases.curve) < 20
    assert max(value for _, value in phases.curve) == max(values)
    assert [seconds for seconds, _ in phases.curve] == sorted(seconds for seconds, _ in phases.curve)


def test_a_real_allocation_is_seen() -> None:
    with Phases(CPU, interval=0.001) as phases:
        phases.mark("begin")
        tensor = torch.ones(64 * MIB // 4)
        time.sleep(0.05)
        phases.mark("forward")
        del tensor
        phases.mark("backward")
    begin, forward, backward = (phases.table[phase] for phase in PHASES[:3])
    assert begin.first is not None
    assert forward.first is not None
    assert backward.first is not None
    assert forward.first - begin.first > 60 * MIB
    assert forward.first - backward.first > 60 * MIB
    assert phases.peak is not None
    assert phases.peak >= forward.peak


def test_without_proc_there_is_no_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_STATM", tmp_path / "statm")
    monkeypatch.setattr(module, "_STATUS", tmp_path / "status")
    with Phases(CPU) as phases:
        phases.mark("begin")
    assert phases.table["begin"].first is None
    assert phases.curve == []
    assert phases.peak is None
