"""Runs csrc/cuda/ as nvcc compiles it in the PTX emulator, launched by the ops' own host code (library.cpp)."""

from __future__ import annotations

import contextlib
import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from lab.emulators.ptx_emulator import Kernel, Memory, Module, launch
from tests.support.simt.build import ROOT, includes

ARCHITECTURE = "compute_90"
FLAGS = ["-std=c++20", "-O3", "-fmad=false", f"-arch={ARCHITECTURE}", "-DUSE_CUDA"]
LAUNCHER = ctypes.CFUNCTYPE(  # kernel's address, blocks, threads, parameters and their bytes
    None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
)


def missing() -> str | None:
    """Why there is no PTX here, or None."""
    return None if shutil.which("nvcc") else "nvcc is not installed"


def readable(names: list[str]) -> list[str]:
    """Demangled names without return types, arguments and anonymous namespaces, in which g++ and nvcc differ."""
    plain = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    plain = re.sub(r"\(anonymous namespace\)::|_GLOBAL__N\w*?::", "", plain)
    return [re.sub(r"^.*?(memkern::\w+(<.*?>)?)\(.*$", r"\1", line) for line in plain.splitlines()]


def compile_all(folder: Path) -> None:
    """Compiles all .cu files to PTX in ``folder``, as one translation unit: torch's headers take most of the time."""
    unit = folder / "all.cu"
    sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    unit.write_text("".join(f'#include "{source}"\n' for source in sources))
    command = ["nvcc", *FLAGS, "-ptx", *includes(folder), str(unit), "-o", str(folder / "all.ptx")]
    compilation = subprocess.run(command, capture_output=True, text=True)
    assert compilation.returncode == 0, compilation.stderr[-6000:]


class Program:
    """The kernels of all .cu files, from the folder that compile_all filled, by readable name."""

    def __init__(self, folder: Path) -> None:
        self.modules = [Module(path.read_text()) for path in sorted(folder.glob("*.ptx"))]
        self.kernels: dict[str, tuple[Module, Kernel]] = {}
        for module in self.modules:
            for name, kernel in zip(readable([*module.kernels]), module.kernels.values(), strict=True):
                self.kernels[name] = module, kernel


@contextlib.contextmanager
def emulated(program: Program, library: ctypes.CDLL, path: Path) -> Iterator[list[str]]:
    """Inside the ``with`` block the ops of memkern_simt launch PTX; yields the list of the kernels launched."""
    symbols = subprocess.run(["nm", str(path)], capture_output=True, text=True, check=True).stdout.splitlines()
    entries = [line.split() for line in symbols if len(line.split()) == 3]  # address, type, name
    offsets = dict(zip((int(e[0], 16) for e in entries), readable([e[2] for e in entries]), strict=True))
    library.memkern_simt_base.restype = ctypes.c_void_p
    base = library.memkern_simt_base()
    launched: list[str] = []
    errors: list[Exception] = []

    @LAUNCHER
    def run(address: int, blocks: int, threads: int, params: int, size: int) -> None:
        try:
            name = offsets[address - base]
            launched.append(name)
            module, kernel = program.kernels[name]
            launch(module, kernel, blocks, threads, ctypes.string_at(params, size), Memory.process())
        except Exception as error:  # must not reach C++
            errors.append(error)

    library.memkern_simt_launch_with(run)
    try:
        yield launched
    finally:
        library.memkern_simt_launch_with(ctypes.cast(None, LAUNCHER))
        if errors:
            raise errors[0]
