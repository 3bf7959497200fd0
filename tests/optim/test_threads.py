"""How many threads a step on the CPU has, also under torchrun, which sets OMP_NUM_THREADS=1 for several processes."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memkern import optim
from memkern.optim import threads
from memkern.optim.plan import StepPlan
from tests.support.late_transfers import LateHostOffload
from tests.support.ranks import TORCHRUN_TWO

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variables or cached numbers of threads from outside a test."""
    for name in ("MEMKERN_STEP_THREADS", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    threads.step_threads.cache_clear()
    threads.warn_of_one_core.cache_clear()
    yield
    threads.step_threads.cache_clear()
    threads.warn_of_one_core.cache_clear()
    torch.set_num_threads(before)


UNDER_TORCHRUN = {"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}


# cores, torchrun_cores: in the affinity of the process and of torchrun; current: torch's number of threads
@pytest.mark.parametrize(
    ("variables", "cores", "torchrun_cores", "current", "expected"),
    [
        (UNDER_TORCHRUN, 64, 64, 1, 16),
        (UNDER_TORCHRUN, 8, 64, 1, 8),  # bound to cores of its own
        (UNDER_TORCHRUN, 32, 64, 1, 16),  # bound to a NUMA node, with another rank
        (UNDER_TORCHRUN, 2, 2, 1, 1),
        (UNDER_TORCHRUN, 64, 64, 6, 6),  # torch.set_num_threads
        (UNDER_TORCHRUN | {"OMP_NUM_THREADS": "2"}, 64, 64, 1, 1),
        ({"OMP_NUM_THREADS": "1"}, 64, 64, 1, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 64, 64, 1, 1),
        (UNDER_TORCHRUN | {"MEMKERN_STEP_THREADS": "3"}, 64, 64, 1, 3),
        ({"MEMKERN_STEP_THREADS": "3"}, 64, 64, 8, 3),
    ],
)
def test_threads_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    cores: int,
    torchrun_cores: int,
    current: int,
    expected: int,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(torchrun_cores if pid else cores)}, raising=False)
    assert threads.step_threads(current) == expected


@pytest.mark.parametrize(
    ("variables", "cores", "current", "warns"),
    [
        ({"OMP_NUM_THREADS": "1"}, 64, 1, True),  # as mpirun or a cluster's scheduler sets it
        ({}, 64, 64, False),
        ({}, 4, 1, False),
        ({"MEMKERN_STEP_THREADS": "1"}, 64, 1, False),
        (UNDER_TORCHRUN | {"LOCAL_WORLD_SIZE": "64"}, 64, 1, False),
    ],
)
def test_a_step_on_one_of_many_cores_warns_once(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], cores: int, current: int, warns: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(cores)}, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: current)
    p = torch.nn.Parameter(torch.ones(8))
    p.grad = torch.ones(8)
    optimizer = LateHostOffload(optim.AdamW8bit, [p])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
    assert ["one of 64 cores" in str(w.message) for w in caught if "cores" in str(w.message)] == [True] * warns


@pytest.mark.parametrize("value", ["0", "-1", "many", "\u0663"])  # an Arabic digit
def test_a_bad_number_of_threads_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MEMKERN_STEP_THREADS", value)
    with pytest.raises(ValueError, match="MEMKERN_STEP_THREADS must be a whole number above 0, got"):
        threads.step_threads(1)


@pytest.mark.parametrize("fails", [False, True])
def test_the_number_of_threads_is_set_for_the_step_alone(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    threads_of_steps = []
    run = StepPlan.run

    def record(*args: Any) -> None:
        threads_of_steps.append(torch.get_num_threads())
        if fails:
            raise InterruptedError
        run(*args)

    monkeypatch.setattr(StepPlan, "run", record)
    monkeypatch.setenv("MEMKERN_STEP_THREADS", "2")
    torch.set_num_threads(1)
    p = torch.nn.Parameter(torch.ones(8))
    p.grad = torch.ones(8)
    optimizer = optim.AdamW8bit([p])
    if fails:
        with pytest.raises(InterruptedError):
            optimizer.step()
    else:
        optimizer.step()
    assert threads_of_steps == [2]
    assert torch.get_num_threads() == 1


@pytest.mark.full
def test_each_rank_under_torchrun_has_its_share_of_cores(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, torch\nfrom memkern.optim import threads\n"
        "print('threads', torch.get_num_threads(), threads.step_threads(torch.get_num_threads()))\n"
    )
    command = [*TORCHRUN_TWO, str(program)]
    assert command[0] == sys.executable
    process = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    assert process.stdout.splitlines() == [f"threads 1 {max(1, CORES // 2)}"] * 2
