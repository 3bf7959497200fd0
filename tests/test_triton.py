"""The Triton backend without a GPU: its kernels in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memkern import backend

ROOT = Path(__file__).parents[1]
missing = backend.available()["triton"]
pytestmark = [pytest.mark.skipif(missing is not None, reason=str(missing))]

INTERPRETED = {
    "activations": ["tests/triton_activation.py"],
    "functions": [
        "tests/test_activation.py",
        "-k",
        "triton and (gradient_is or planes) and (odd or slice or channels)",
    ],
    "steps": ["tests/triton_steps.py"],
    "ops": [
        "tests/test_ops.py",
        "tests/test_ops_errors.py",
        "-k",
        "memkern_triton and (bad_steps or bad_calls and quantize or scaler) and not lamb and not lars",
    ],
    "quantizers": [
        "tests/test_blockwise.py",
        "tests/test_layout.py",
        "-k",
        "triton and not boundary and not large",
    ],
    "boundaries": ["tests/test_blockwise.py", "-k", "triton and boundary and (1.0 or e-38 or dynamic)"],
    "optimizers": [
        "tests/test_optim_numerics.py",
        "tests/test_optim_clip.py",
        "-k",
        "triton and (late_steps or test_norm)",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("what", INTERPRETED)
def test_interpreted(what: str) -> None:
    what_to_run, options = INTERPRETED[what], ["-q", "-x", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *what_to_run],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert " passed" in result.stdout
