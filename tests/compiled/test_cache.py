"""torch's cache on disk: a second process takes the graph that the first has compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

STEP = """
import hashlib, torch, memkern
from torch._dynamo.utils import counters
torch.set_num_threads(1)
torch.manual_seed(0)
x, w = torch.randn(64, 128), torch.randn(128, 128).requires_grad_()
f = memkern.compile(lambda w: (torch.tanh(x @ w) @ w).square().mean(), saved_bits=8)
f(w).backward()
found = counters["aot_autograd"]
print(hashlib.sha256(w.grad.numpy().tobytes()).hexdigest(), found["autograd_cache_hit"], found["autograd_cache_miss"])
"""


def _step(cache: Path) -> tuple[str, int, int]:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", STEP], env=environment, capture_output=True, text=True, check=True)
    digest, hits, misses = run.stdout.split()
    return digest, int(hits), int(misses)


@pytest.mark.full
def test_a_second_process_takes_the_compiled_graph(tmp_path: Path) -> None:
    digest, *counts = _step(tmp_path)
    assert counts == [0, 1]
    assert _step(tmp_path) == (digest, 1, 0)
