"""Counts the instructions per element of the CPU kernels for NEON, AVX2 and AVX-512.

tests/support/cpu_kernels.cpp runs one kernel on 4,096 and on 12,288 elements in blocks of 128. qemu logs each basic
block that it runs between the first and the last address of an instruction set's kernels. The difference of the two
counts, divided by the difference in elements, is the cost of the loop without its start. The codec is power, dithered
in the optimizers. qemu has no AVX-512: there the processor runs one instruction at a time (count_instructions.cpp).

Debian: apt-get install g++ g++-aarch64-linux-gnu qemu-user.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import machine, report
from lab.studies import study
from tests.support.cpu_driver import compile_driver

ROOT = Path(__file__).parents[2]
COUNTER = ROOT / "tests/support/count_instructions.cpp"
TOOLS = {  # instruction set: compiler, nm, emulator
    "neon": ("aarch64-linux-gnu-g++", "aarch64-linux-gnu-nm", ["qemu-aarch64"]),
    "avx2": ("g++", "nm", ["qemu-x86_64", "-cpu", "max"]),
    "avx512": ("g++", "nm", []),
}
_KINDS = ("Adam", "Lion", "quantize", "dequantize")
KERNELS = tuple(f"{kind} {dtype}" for kind in _KINDS for dtype in ("fp32", "bf16"))
FEW, MANY = 4096, 12288  # elements
COLUMNS = (*report.PROVENANCE, "instruction_set", "kernel", "instructions")


def _addresses(nm: str, program: Path, isa: str) -> tuple[str, str]:
    """The first address of an instruction set's functions, which are side by side, and the address after the last."""
    symbols = subprocess.run([nm, "-n", program], capture_output=True, text=True, check=True).stdout
    functions = re.findall(r"^(\w+) [tTwW] (.*)", symbols, re.MULTILINE)
    # The kernels are in a namespace of the instruction set's name, "6avx512" in mangled names.
    own = [i for i, (_, name) in enumerate(functions) if f"{len(isa)}{isa}" in name]
    return functions[own[0]][0], functions[own[-1] + 1][0]


_INSTRUCTION = re.compile(r"0x(\w+): +\w+( \w+)* {2,}\w")
"""An instruction's address, bytes and name in qemu's log. A line with bytes after the eighth has no name."""


def _executed(log: Path) -> int:
    """The number of instructions executed. qemu's log lists a basic block once, and has its address at each run."""
    sizes: dict[int, int] = {}
    block, total = None, 0
    with log.open(errors="replace") as lines:
        for line in lines:
            if executed := re.match(r"Trace \d+: \S+ \[\w+/(\w+)/", line):
                total += sizes[int(executed[1], 16)]
                block = None
            elif listed := _INSTRUCTION.match(line):
                block = int(listed[1], 16) if block is None else block
                sizes[block] = sizes.get(block, 0) + 1
            elif line.startswith("IN:"):
                block = None
    return total


def _count(emulator: list[str], folder: Path, addresses: tuple[str, str], program: list[str]) -> int:
    """The number of instructions that a program executes between two addresses."""
    first, last = addresses
    if not emulator:
        command = [str(folder / "count_instructions"), first, last, *program]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    log = folder / "log"
    options = ["-d", "in_asm,exec,nochain", "-dfilter", f"0x{first}..0x{last}", "-D", str(log)]
    subprocess.run([*emulator, *options, *program], check=True)
    return _executed(log)


def rows(isas: Sequence[str]) -> Iterator[dict[str, str]]:
    provenance = machine.provenance("cpu")
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(os.cpu_count()) as pool:
        folder = Path(name)
        subprocess.run(["g++", "-O2", str(COUNTER), "-o", str(folder / "count_instructions")], check=True)
        for isa in isas:
            compiler, nm, emulator = TOOLS[isa]
            program = compile_driver(compiler, (isa,), folder, pool)
            addresses = _addresses(nm, program, isa)
            for kernel in KERNELS:
                few, many = (
                    _count(emulator, folder, addresses, [str(program), isa, kernel, str(size)]) for size in (FEW, MANY)
                )
                per_element = f"{(many - few) / (MANY - FEW):.1f}"
                yield study.row(provenance, COLUMNS, (isa, kernel, per_element))


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("cpu_instructions", __doc__)
    parser.add_argument("--isa", choices=TOOLS, help="one instruction set (default: all)")
    args = parser.parse_args(argv)
    path = args.out / "cpu-instructions.csv"
    study.write(path, rows([args.isa] if args.isa else list(TOOLS)), COLUMNS, shown=3)


if __name__ == "__main__":
    main()
