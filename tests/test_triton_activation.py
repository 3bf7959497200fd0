"""Triton's few-bit activations without a GPU: in the interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memkern import backend

missing = backend.available()["triton"]


FILES = {
    "ops": ["triton_activation.py"],
    "functions": [
        "test_activation.py",
        "-k",
        "triton and (gradient_is or planes) and (odd or slice or channels)",
    ],
}


@pytest.mark.slow
@pytest.mark.skipif(missing is not None, reason=str(missing))
@pytest.mark.parametrize("what", FILES)
def test_interpreted(what: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *FILES[what]],
        cwd=Path(__file__).parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert " passed" in result.stdout
