"""MEMKERN_BUILD=cuda compiles and links all sources and a probe kernel, which needs nvcc and no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tree import ROOT, built_libraries

PROBE = r"""
#include <cuda_runtime.h>
__global__ void twice(float* x) { x[threadIdx.x] *= 2; }
extern "C" __attribute__((visibility("default"))) int memkern_cuda_probe() {
  twice<<<1, 32>>>(nullptr);
  return 42;
}
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.long  # 150 to 200 s: lab/tests/test_cuda_host.py has nvcc compile and link the same sources at each run
@pytest.mark.parametrize("jobs", ["2", "4"])  # all .cu files in one nvcc call, and each in its own
def test_cuda_sources_are_compiled_and_linked(tmp_path: Path, jobs: str) -> None:
    options = {"MEMKERN_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": "9.0+PTX", "MEMKERN_CXX_FLAGS": "-O0"}
    options["MAX_JOBS"] = jobs
    libraries = built_libraries("cuda", options, {"csrc/cuda/probe.cu": PROBE})
    shutil.copytree(ROOT / "memkern", tmp_path / "memkern", ignore=shutil.ignore_patterns("*.so"))
    for library in libraries.iterdir():
        shutil.copy(library, tmp_path / "memkern")

    # In a process of its own: the ops register once.
    code = (
        "import ctypes, memkern; print(memkern.report()['build']['cuda_archs'], "
        "ctypes.CDLL(str(memkern.backend.LIBRARY)).memkern_cuda_probe())"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert run.stdout.split() == ["9.0+PTX", "42"]

    # torch's stream function binds only where the library depends on libtorch, which depends on libtorch_cuda.
    dynamic = subprocess.run(
        ["readelf", "-d", str(tmp_path / "memkern" / "libmemkern.so")],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert {"libtorch.so", "libtorch_cpu.so", "libc10.so"} <= {*needed}
    assert not [name for name in needed if "cuda" in name], "it must load in a torch without CUDA"
