"""The compiled CUDA ops, host code and kernels, pass all cases on made-up devices (lab/emulators/fakegpu).

This covers what the SIMT shim and lab/tests/test_gpu_ptx.py leave out: lookup of torch's stream, the device guard,
launches by nvcc's own stubs with their arguments, captures.
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
    """The error of each case, "" for none, from a process of its own, as torch believes that CUDA is there."""
    sources = (path.read_bytes() for path in sorted(build.HERE.iterdir()) if path.is_file())
    folder = cache.built("fakegpu", build.compile_all, *sources)
    root = Path(__file__).resolve().parents[2]
    process = subprocess.run(
        [sys.executable, "-m", "lab.emulators.fakegpu.cases", str(folder)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    errors = {row["case"]: row["error"] for row in map(json.loads, process.stdout.splitlines())}
    assert {*errors} == {*all_cases()}, process.stderr[-6000:]
    return errors


@pytest.mark.parametrize("name", all_cases())
def test_a_case_passes(errors: dict[str, str], name: str) -> None:
    assert not errors[name], errors[name]
