"""The CUDA kernels as nvcc compiles them, with every access watched, as compute-sanitizer does on a GPU.

On the made-up devices (lab/emulators/fakegpu), with warps in four orders. Faults planted in these kernels are found;
lab/tests/test_ptx_checks.py has small kernels with faults of each kind.
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
# Lanes without a block left read their tile's first, whose owner may have stored it by then. Nothing depends on what
# they read: it is spoiled here, and results are the reference's. To load only where there is a block takes three
# instructions more in each turn of the main path (sm_90: 525, not 522, for AdamW in bf16; 362, not 359, for Lion).
WITHOUT_WORK = re.compile(r"(adam|lamb|lion|lars|sgd|muon|lamb_norm|lars_norm)_tiles\w*: (ld\.global|cp\.async)")


@pytest.fixture(scope="module")
def folder() -> Path:
    sources = (path.read_bytes() for path in sorted(build.HERE.iterdir()) if path.is_file())
    return cache.built("fakegpu", build.compile_all, *sources)


def run(folder: Path, order: str, *cases: str) -> list[dict[str, Any]]:
    """In a process of its own: torch believes in CUDA there."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "lab.emulators.fakegpu.checked", str(folder), order, *cases],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows, done.stderr[-6000:]
    assert "not run" in rows[-1], done.stderr[-6000:]
    return rows


def nothing_found(rows: list[dict[str, Any]]) -> None:
    *cases, end = rows
    assert not [row for row in cases if row["error"]]
    assert not [what for what in end["raced"] if not WITHOUT_WORK.search(what)]


def test_a_sample(folder: Path) -> None:
    nothing_found(run(folder, "last", *checked.SAMPLE))


def test_some_planted_faults_are_found(folder: Path) -> None:
    few = [name for name in checked.PLANTED if checked.PLANTED[name][1] == checked.NORM][::2]
    few += [name for name in checked.PLANTED if name.startswith("copy: not waited")]
    assert not [row for row in run(folder, "planted", *few)[:-1] if row["error"]]


@pytest.mark.long
@pytest.mark.parametrize("order", ["together", "first", "last", "random"])
def test_all_cases(folder: Path, order: str) -> None:
    rows = run(folder, order)
    nothing_found(rows)
    # All kernels, but those of activations with an exponential, whose approximation is not in the emulator.
    assert not [name for name in rows[-1]["not run"] if "encode_vectors" not in name]


@pytest.mark.long
def test_planted_faults_are_found(folder: Path) -> None:
    """Three of each kind."""
    kinds = [name.partition(":")[0] for name in checked.PLANTED]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(("race", "init", "sync", "memory", "copy"), 3)
    rows = run(folder, "planted")[:-1]
    assert {row["case"] for row in rows} == {*checked.PLANTED}
    assert not [row for row in rows if row["error"]]
