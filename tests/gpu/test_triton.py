"""Runs the tests of the Triton backend in Triton's interpreter, without a GPU, each group in a process of its own."""

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

CASES = "tests/kernels/test_cases.py"
QUANTIZERS = [f"tests/quant/test_{name}.py" for name in ("blockwise", "dither", "layout")]
INTERPRETED = {  # pytest's arguments; of these tests those marked `interpreted` run (tests/support/interpreted.py)
    "activations": [CASES, "tests/fewbit/test_activation.py", "-k", "few_bit or fewbit"],
    "quantizers": [CASES, *QUANTIZERS, "-k", "quant or norm"],
    **{name: [CASES, "-k", name] for name in ("adam_step", "lamb_step", "lars_step", "lion_step", "sgd_step", "muon")},
    "plans": ["tests/gpu/triton_steps.py", "tests/gpu/triton_squares.py"],
    "ops": ["tests/contract/test_ops.py"],
    "optimizers": ["tests/optim/test_clip.py"],
    "weights": ["tests/optim/loop/test_weights.py", "tests/optim/loop/test_weight_edits.py"],
}


def test_older_tritons_can_parse_the_kernels() -> None:
    """Triton 3.6, which torch 2.11 comes with, fails at the targets of ``(a, b), c = ...``; 3.9 does not."""
    for file in (ROOT / "memkern" / "triton").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                nested = isinstance(target, ast.Tuple) and any(isinstance(x, ast.Tuple | ast.List) for x in target.elts)
                assert not nested, f"{file.name}:{node.lineno}"


# The weights take 3 minutes; test_gpu_ptx.py runs the PTX of some of those kernels.
TIERS = {"weights": pytest.mark.long, "ops": pytest.mark.full, "optimizers": pytest.mark.full}


@pytest.mark.parametrize("tests", [pytest.param(t, marks=TIERS.get(t, pytest.mark.emulated)) for t in INTERPRETED])
def test_interpreted(tests: str) -> None:
    options = ["-q", "-x", "-m", "", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *INTERPRETED[tests]],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert " passed" in result.stdout
