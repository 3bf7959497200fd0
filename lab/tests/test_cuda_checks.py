"""The compiled CUDA kernels have no races, reads of unwritten bytes, partial barriers or accesses out of bounds.

Every access is checked on the made-up devices (lab/emulators/fakegpu), with warps in four orders. Faults planted in
these kernels are found; lab/tests/test_ptx_checks.py has small kernels with faults of each kind.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.emulators.fakegpu import build, checked
from tests.support import cache

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.full,
    pytest.mark.skipif(build.missing() is not None, reason=str(build.missing())),
]
# Idle lanes, for which no block is left, read their tile's first block, which its owner may have stored by then. No
# result depends on it: these reads are spoiled here, and results are the reference's. A condition around the load would
# take three instructions in each iteration (sm_90: 525, not 522, for AdamW in bf16; 362, not 359, for Lion).
IDLE_LANES = re.compile(r"(adam|lamb|lion|lars|sgd|muon|lamb_norm|lars_norm)_tiles\w*: (ld\.global|cp\.async)")


@pytest.fixture(scope="module")
def folder() -> Path:
    sources = (path.read_bytes() for path in sorted(build.HERE.iterdir()) if path.is_file())
    return cache.built("fakegpu", build.compile_all, *sources)


def run(folder: Path, order: str, *cases: str) -> list[dict[str, Any]]:
    """The lines of checked.py, in a process of its own, as torch believes that CUDA is there."""
    root = Path(__file__).resolve().parents[2]
    process = subprocess.run(
        [sys.executable, "-m", "lab.emulators.fakegpu.checked", str(folder), order, *cases],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    rows = [json.loads(line) for line in process.stdout.splitlines()]
    assert rows, process.stderr[-6000:]
    assert "not run" in rows[-1], process.stderr[-6000:]
    return rows


def assert_no_faults(rows: list[dict[str, Any]]) -> None:
    *cases, end = rows  # end: the kernels that did not run, and reads that raced
    assert not [row for row in cases if row["error"]]
    assert not [read for read in end["raced"] if not IDLE_LANES.search(read)]


def test_a_sample_is_without_faults(folder: Path) -> None:
    assert_no_faults(run(folder, "last", *checked.SAMPLE))


def test_some_planted_faults_are_found(folder: Path) -> None:
    chosen = [name for name in checked.PLANTED if checked.PLANTED[name][1] == checked.NORM][::2]
    chosen += [name for name in checked.PLANTED if name.startswith("copy: not waited")]
    assert not [row for row in run(folder, "planted", *chosen)[:-1] if row["error"]]


@pytest.mark.long
@pytest.mark.parametrize("order", ["together", "first", "last", "random"])
def test_all_cases_are_without_faults(folder: Path, order: str) -> None:
    rows = run(folder, order)
    assert_no_faults(rows)
    # All kernels run, but for activations with an exponential, whose approximation the emulator does not have.
    assert not [name for name in rows[-1]["not run"] if "encode_vectors" not in name]


@pytest.mark.long
def test_planted_faults_are_found(folder: Path) -> None:
    """There are three of each kind."""
    kinds = [name.partition(":")[0] for name in checked.PLANTED]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(("race", "init", "sync", "memory", "copy"), 3)
    rows = run(folder, "planted")[:-1]
    assert {row["case"] for row in rows} == {*checked.PLANTED}
    assert not [row for row in rows if row["error"]]
