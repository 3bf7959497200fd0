"""Runs random training loops (training_loops.py): MEMKERN_FUZZ_LOOPS of them (``run``), or ``run_for`` some seconds."""

from __future__ import annotations

import os
import time
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

LOOPS = int(os.environ.get("MEMKERN_FUZZ_LOOPS", "400"))
LONG_TEST_S = float(os.environ.get("MEMKERN_FUZZ_SECONDS", "3600"))  # seconds that the long test runs
SEED = int(os.environ.get("MEMKERN_FUZZ_SEED", "1"))  # of the first fifty loops; the next fifty have SEED + 1


def run(machine: Any, number: int, loops: int) -> None:
    options = settings(
        max_examples=loops,
        stateful_step_count=25,
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=[*HealthCheck],
        phases=[Phase.generate, *([Phase.shrink] if os.environ.get("MEMKERN_FUZZ_SHRINK") else [])],
        report_multiple_bugs=False,
        print_blob=False,
    )
    run_state_machine_as_test(seed(number)(machine), settings=options)


def run_for(seconds: float, machine: Any) -> None:
    """Runs fifty loops at a time, each time with the next seed, until the time is over."""
    end, number = time.monotonic() + seconds, SEED
    while time.monotonic() < end:
        run(machine, number, min(LOOPS, 50))
        number += 1
