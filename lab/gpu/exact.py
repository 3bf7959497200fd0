"""Compiles exact.cu for the GPU here and runs it: what the fast paths assume, over all floats and 2^33 pairs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .gpu import find_gpu
from .parts import tool
from .runner import ROOT

SOURCE = Path(__file__).with_name("exact.cu")
PROGRAM = ROOT / "build" / "gpu" / "exact"


def compile_for(arch: str, target: Path, *flags: str) -> None:
    """``arch``: such as sm_90. With the flags that the kernels are compiled with."""
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [str(tool("nvcc")), "-O3", "-std=c++20", "-fmad=false", f"-arch={arch}", f"-I{ROOT / 'csrc'}"]
    subprocess.run([*command, *flags, str(SOURCE), "-o", str(target)], check=True)


def main() -> int:
    gpu = find_gpu()
    arch = f"sm_{(gpu.capability if gpu else '9.0').replace('.', '')}"
    compile_for(arch, PROGRAM)
    print(f"{PROGRAM.name} for {arch}: {PROGRAM.stat().st_size >> 10} KiB", flush=True)
    if "--plan" in sys.argv:
        print("would run it: roots of all floats, 2^33 divisions, about a second")
        return 0
    return subprocess.run([str(PROGRAM)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
