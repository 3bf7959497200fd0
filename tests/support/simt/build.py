"""Compiles csrc/cuda/ with g++ and loads it: its ops for CPU tensors, in memkern_simt.

cuda/device.cuh and cuda/torch_device.h of this folder take the place of those of csrc/; simt.h runs the threads.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import shutil
import subprocess
from pathlib import Path

import torch

from memkern.schemas import SCHEMAS

ROOT = Path(__file__).resolve().parents[3]
FLAGS = [
    *("-std=c++20", "-O2", "-fPIC", "-fno-math-errno", "-ffp-contract=off", "-g1"),
    *("-Wall", "-Wno-attributes", "-Wno-unknown-pragmas"),
]
LIBRARY = "libmemkern_simt.so"
_library: list[torch.library.Library] = []  # its ops live as long as it does


def missing() -> str | None:
    """Why the library cannot be built here; None where it can."""
    if shutil.which("g++") is None:
        return "g++ is not installed"
    return None if os.uname().machine == "x86_64" else "the fibers' switch is written for x86-64"


def includes(folder: Path) -> list[str]:
    """Flags for csrc/'s headers; those that setup.py writes are made in ``folder``, as it may not have run."""
    generated = folder / "generated"
    runpy.run_path(str(ROOT / "csrc" / "generate.py"))["write_headers"](generated)
    torch_dir = Path(torch.__file__).parent / "include"
    paths = [ROOT / "csrc", generated, torch_dir, torch_dir / "torch/csrc/api/include"]
    return ["-DTORCH_TARGET_VERSION=0x020a000000000000", *(f"-I{path}" for path in paths)]


def compile_library(folder: Path, *flags: str) -> Path:
    """The shared library, in ``folder``."""
    # One translation unit: most of the time goes into torch's headers.
    sources = [
        *sorted((ROOT / "csrc" / "cuda").glob("*.cu")),
        ROOT / "tests" / "support" / "simt" / "library.cpp",
    ]
    unit = folder / "all.cpp"
    unit.write_text("".join(f'#include "{source}"\n' for source in sources))
    library = folder / LIBRARY
    # First the folder whose cuda/device.cuh and cuda/torch_device.h stand in for those of csrc/.
    stand_ins = f"-I{ROOT / 'tests' / 'support' / 'simt'}"
    command = ["g++", *FLAGS, *flags, stand_ins, *includes(folder), "-shared", str(unit), "-o", str(library)]
    command += [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu", "-lc10"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-6000:]
    return library


def load(library: Path) -> ctypes.CDLL:
    """Registers the ops as ``torch.ops.memkern_simt``; returns the library for its own functions."""
    if not _library:
        _library.append(torch.library.Library("memkern_simt", "DEF"))
        for name, schema in SCHEMAS.items():
            _library[0].define(name + schema)
        torch.ops.load_library(str(library))
    return ctypes.CDLL(str(library))
