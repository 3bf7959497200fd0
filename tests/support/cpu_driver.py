"""Compiles cpu_kernels.cpp, a program that runs the kernels of csrc/cpu, for this processor or for an emulated ARM."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
DRIVER = ROOT / "tests/support/cpu_kernels.cpp"
# The compiler for ARM on other processors, and what runs its programs there.
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ["-O3", "-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-fno-tree-vectorize", "-Wno-psabi"]


def compile_driver(compiler: str, isas: tuple[str, ...], folder: Path, pool: ThreadPoolExecutor) -> Path:
    """The driver with the kernels of some instruction sets, statically linked."""
    sources = [ROOT / f"csrc/cpu/simd/compile_{isa}.cpp" for isa in isas] + [DRIVER]
    objects = [folder / f"{compiler}-{source.stem}.o" for source in sources]
    runs = f"-DISAS={' '.join(f'RUN({isa})' for isa in isas)}"

    def compile_one(source: Path, target: Path) -> None:
        flags = [*FLAGS, f"-I{ROOT / 'csrc'}", runs]
        subprocess.run([compiler, *flags, "-c", str(source), "-o", str(target)], check=True)

    list(pool.map(compile_one, sources, objects))
    program = folder / f"{compiler}-driver"
    subprocess.run([compiler, "-static", *map(str, objects), "-o", str(program)], check=True)
    return program
