"""The CUDA ops as nvcc compiles them, host code and kernels, on made-up devices (lab/emulators/fakegpu).

What the SIMT shim and lab/tests/test_gpu_ptx.py leave out is here: lookup of torch's stream, the device guard, launches
by nvcc's own stubs with their arguments, captures. It stands for a GPU until there is one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.emulators.fakegpu import build
from lab.emulators.fakegpu.cases import all_cases
from tests.support import cache

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.full,
    pytest.mark.skipif(build.missing() is not None, reason=str(build.missing())),
]


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """What went wrong in each case. In one process of its own: torch believes in CUDA there."""
    sources = (path.read_bytes() for path in sorted(build.HERE.iterdir()) if path.is_file())
    folder = cache.built("fakegpu", build.compile_all, *sources)
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        [sys.executable, "-m", "lab.emulators.fakegpu.cases", str(folder)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    found = {row["case"]: row["error"] for row in map(json.loads, run.stdout.splitlines())}
    assert {*found} == {*all_cases()}, run.stderr[-6000:]
    return found


@pytest.mark.parametrize("name", all_cases())
def test_host_code(errors: dict[str, str], name: str) -> None:
    assert not errors[name], errors[name]
