"""The Triton backend without a GPU: its kernels in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memkern import backend

ROOT = Path(__file__).parents[2]
missing = backend.available()["triton"]
pytestmark = [pytest.mark.skipif(missing is not None, reason=str(missing))]

INTERPRETED = {  # files; what runs of each has the mark `interpreted` (tests/support/interpreted.py)
    "activations": ["tests/gpu/triton_activation.py", "tests/fewbit/test_activation.py"],
    "steps": ["tests/gpu/triton_steps.py", "tests/gpu/triton_squares.py"],
    "muon": ["tests/gpu/triton_muon.py"],
    "ops": ["tests/contract/test_ops.py", "tests/contract/test_ops_errors.py"],
    "quantizers": [
        "tests/quant/test_blockwise.py",
        "tests/quant/test_dither.py",
        "tests/quant/test_layout.py",
    ],
    "optimizers": [
        "tests/optim/test_numerics.py",
        "tests/optim/test_clip.py",
    ],
    "weights": ["tests/optim/loop/test_weights.py", "tests/optim/loop/test_weight_edits.py"],
}


def test_older_tritons_can_parse_the_kernels() -> None:
    """Triton 3.6, which torch 2.11 comes with, fails at the targets of ``(a, b), c = ...``; 3.9 does not."""
    for file in (ROOT / "memkern" / "triton").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                nested = isinstance(target, ast.Tuple) and any(isinstance(x, ast.Tuple | ast.List) for x in target.elts)
                assert not nested, f"{file.name}:{node.lineno}"


# The weights take 3 minutes; test_gpu_ptx.py runs the PTX of some of those kernels. The ops and optimizers call every
# kernel, the others call it with every layout and dtype.
TIERS = {"weights": pytest.mark.long, "ops": pytest.mark.full, "optimizers": pytest.mark.full}


@pytest.mark.parametrize("what", [pytest.param(w, marks=TIERS.get(w, pytest.mark.emulated)) for w in INTERPRETED])
def test_interpreted(what: str) -> None:
    what_to_run, options = INTERPRETED[what], ["-q", "-x", "-m", "", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *what_to_run],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert " passed" in result.stdout
