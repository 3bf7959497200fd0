"""Compiles csrc/cuda/ with nvcc, host code and PTX, and links it with the runtime that stands in for CUDA's."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from tests.support.simt.build import ROOT, includes

HERE = Path(__file__).parent
CUDA = ["-std=c++20", "-O3", "-fmad=false", "-arch=compute_90", "-DUSE_CUDA"]
SHARED = ["-shared", "-cudart", "none", "-Xcompiler=-fPIC", "-Xlinker=-rpath=$ORIGIN"]
REGISTER = """
#include "common/ops.h"
STABLE_TORCH_LIBRARY_IMPL(memkern_nvcc, CUDA, m) {
  MEMKERN_REGISTER_OPS(m, cuda);
  m.impl("few_bit_forward", TORCH_BOX(&memkern::few_bit_forward_cuda));
}
"""


class Built(NamedTuple):
    runtime: Path  # in place of libcudart
    device: Path  # in place of libtorch_cuda
    ops: Path  # the library of the ops: host code
    ptx: Path  # the kernels


def missing() -> str | None:
    """Why the made-up devices cannot be built here, or None."""
    if torch.version.cuda is not None:
        return "it stands in for libtorch_cuda, and this torch has its own"
    return next((f"{name} is not installed" for name in ("nvcc", "g++") if shutil.which(name) is None), None)


def _run(*command: str | Path, cwd: Path) -> None:
    process = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-6000:]


def compile_all(folder: Path) -> Built:
    built = Built(*(folder / name for name in ("libfakecudart.so", "libfakedevice.so", "libops.so", "ops.ptx")))
    lib = Path(torch.__file__).parent / "lib"
    torch_libraries = [f"-L{lib}", "-ltorch_cpu", "-lc10"]
    headers = includes(folder)
    sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    unit = folder / "ops.cu"
    unit.write_text("".join(f'#include "{source}"\n' for source in sources) + REGISTER)

    def compile_ops() -> None:
        # -keep: the PTX of this very compilation, so that its names are those that the host code registers.
        flags = ["-Xcompiler=-fPIC,-fvisibility=hidden", "-keep", "-c"]
        _run("nvcc", *CUDA, *headers, *flags, unit, "-o", folder / "ops.o", cwd=folder)

    def compile_device() -> None:
        _run("nvcc", *SHARED, "-x", "c++", HERE / "cudart.cpp", "-o", built.runtime, cwd=folder)
        folders = [flag for flag in headers if flag.startswith("-I")]
        libraries = [*torch_libraries, f"-L{folder}", "-lfakecudart"]
        source = HERE / "device.cpp"
        flags = [*SHARED, "-std=c++20", *folders, "-x", "c++"]
        _run("nvcc", *flags, source, "-o", built.device, *libraries, cwd=folder)

    with ThreadPoolExecutor(2) as pool:
        for compilation in [pool.submit(compile_ops), pool.submit(compile_device)]:
            compilation.result()
    libraries = [*torch_libraries, f"-L{folder}", "-lfakedevice", "-lfakecudart"]
    _run("nvcc", *SHARED, folder / "ops.o", "-o", built.ops, *libraries, cwd=folder)
    return built
