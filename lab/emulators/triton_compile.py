"""Compiles Triton kernels without a GPU, and reads registers, spills and instructions from their machine code.

``python -m lab.emulators.triton_compile`` rewrites triton_registers.csv, with which tests compare.
"""

from __future__ import annotations

import csv
import functools
import multiprocessing
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from lab.emulators import sass

WIDE = ("LDG.128", "STG.128")
RECORD = Path(__file__).with_name("triton_registers.csv")


class Compiled(NamedTuple):
    registers: int
    scratch: int  # bytes of local or stack memory, spills included
    widest: int  # bits of the widest access to global memory
    instructions: float  # per parameter or element; 0 for kernels without elements and for AMD


def compiled(name: str, target: str) -> Any:
    """The result of Triton's compiler for a kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lab.emulators.triton_kernels import KERNELS, TYPES
    from memkern.triton.launch import options_of
    from memkern.triton.squares import is_slow

    variant = KERNELS[name]
    types = {
        p.name: "constexpr" if p.is_constexpr else {**TYPES, **variant.types}.get(p.name, "i32")
        for p in variant.kernel.params
    }
    constants = variant.constants
    if target.startswith("gfx"):
        gpu, slow_fp64 = GPUTarget("hip", target, 64), False
        size = "ROWS" if "ROWS" in constants else "BLOCK"
        constants = {k: 2 * v if k == size else v for k, v in constants.items()}  # launch.TILE is twice as large there
    else:
        capability = int(target.removeprefix("sm_"))
        gpu, slow_fp64 = GPUTarget("cuda", capability, 32), is_slow(*divmod(capability, 10))
    if "SLOW_FP64" in types:
        constants = {"SLOW_FP64": slow_fp64, **constants}
    source = ASTSource(fn=variant.kernel, signature=types, constexprs=constants)
    return triton.compile(source, target=gpu, options=options_of(constants.get("BLOCK_SIZE", 0)))


@functools.cache
def facts(name: str, target: str) -> Compiled:
    kernel = compiled(name, target)
    asm = kernel.asm
    if target.startswith("gfx"):
        return _amd(asm["amdgcn"])
    from lab.emulators.triton_kernels import KERNELS

    variant = KERNELS[name]
    elements = variant.elements // (32 * kernel.metadata.num_warps)
    return _nvidia(asm["cubin"], asm["ptx"], elements, has_fast_path(variant))


def has_fast_path(variant: Any) -> bool:
    """Whether the kernel has a branch for rare values beside the fast path (memkern/triton/fast_path.py)."""
    from memkern.triton import codec

    is_adam = variant.kernel.__name__ in ("adam_tiles", "lamb_tiles", "lamb_norm_tiles")
    return is_adam and variant.constants["KIND"] == codec.POWER.value


def all_facts() -> dict[tuple[str, str], Compiled]:
    from lab.emulators.triton_kernels import CASES

    with multiprocessing.get_context("spawn").Pool(int(os.environ.get("MAX_JOBS", 2))) as pool:
        return dict(zip(CASES, pool.starmap(facts, CASES), strict=True))


# ---- machine code


def _tool(name: str, *args: str) -> str:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.run([tools / name, *args], capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert process.returncode == 0, process.stderr
    return process.stdout + process.stderr


def _nvidia(cubin: bytes, ptx: str, elements: int, fast_path: bool) -> Compiled:
    usage = _dumped(cubin, "-res-usage")
    counts = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    accesses = re.findall(r"(?:ld|st)\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", ptx)
    widest = max(int(lanes or 1) * int(bits) for lanes, bits in accesses)
    code = _code(cubin)
    path = _main_path(code)
    if fast_path:
        # Both branches have the same accesses: the shorter is the fast one.
        wide = {key: sum({*key.split(".")} <= {*i.opcode.split(".")} for i in path) for key in WIDE}
        path = sass.shortest_loop(code, wide) or path
    per_element = round(len(path) / elements, 1) if elements else 0.0
    return Compiled(counts["REG"], counts["STACK"] + counts["LOCAL"], widest, per_element)


def _dumped(cubin: bytes, option: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        return _tool("cuobjdump", option, str(file))


def _code(cubin: bytes) -> list[sass.Instruction]:
    (code,) = sass.parsed(_dumped(cubin, "-sass")).values()
    return code


def main_loop(name: str, target: str, wanted: dict[str, int]) -> list[sass.Instruction]:
    """An iteration of a kernel's loop: the shortest path with the wanted wide loads and stores."""
    return sass.shortest_loop(_code(compiled(name, target).asm["cubin"]), wanted)


def _main_path(code: list[sass.Instruction]) -> list[sass.Instruction]:
    """An iteration of the longest loop, without the calls of roots and divisions for rare values.

    In a kernel without a loop, all instructions up to its end.
    """
    index = {i.address: n for n, i in enumerate(code)}
    jumps = {
        n: index[i.target]
        for n, i in enumerate(code)
        if i.opcode.split(".")[0] == "BRA" and i.target in index and index[i.target] != n
    }
    last, n = max(
        ((n, to) for n, to in jumps.items() if to < n),  # backward jumps: of loops
        key=lambda jump: jump[0] - jump[1],
        default=(len(code) - 1, 0),
    )
    path = []
    while n < last and code[n].text != "EXIT":
        path.append(code[n])
        to = jumps.get(n, 0)
        skips = to > n and (not code[n].text.startswith("@") or any("CALL" in i.opcode for i in code[n:to]))
        n = to if skips else n + 1
    return [*path, code[n]]


def _amd(text: str) -> Compiled:
    def number(key: str) -> int:
        return int(re.search(rf"\.{key}:\s+(\d+)", text)[1])

    scratch = number("private_segment_fixed_size") + number("vgpr_spill_count") + number("sgpr_spill_count")
    widths = re.findall(r"(?:global|buffer)_(?:load|store)_dwordx(\d)", text)
    return Compiled(number("vgpr_count"), scratch, max([32 * int(n) for n in widths], default=32), 0.0)


# ---- the record


def version() -> str:
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def recorded() -> tuple[str, dict[tuple[str, str], tuple[int, float]]]:
    """Triton's version, and registers and instructions of each case."""
    with RECORD.open() as file:
        rows = [*csv.DictReader(file)]
    figures = {
        (row["kernel"], row["target"]): (int(row["registers"]), float(row["instructions per parameter"]))
        for row in rows
    }
    return rows[0]["triton"], figures


def write_record() -> None:
    current = all_facts()
    with RECORD.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["kernel", "target", "registers", "instructions per parameter", "triton"])
        for case, kernel in current.items():
            out.writerow([*case, kernel.registers, kernel.instructions, version()])


if __name__ == "__main__":
    write_record()
