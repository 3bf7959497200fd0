"""Compiles Triton kernels ahead of time, without a GPU, and reads what the machine code needs.

``python -m lab.emulators.triton_compile`` writes triton_registers.csv anew.
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
    instructions: float  # for one parameter; 0 where that makes no sense, or there is no disassembler


def compiled(name: str, target: str) -> Any:
    """The kernel as Triton's compiler leaves it."""
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
        constants = {k: 2 * v if k == size else v for k, v in constants.items()}  # as launch.TILE is there
    else:
        capability = int(target.removeprefix("sm_"))
        gpu, slow_fp64 = GPUTarget("cuda", capability, 32), is_slow(*divmod(capability, 10))
    if "SLOW_FP64" in types:
        constants = {"SLOW_FP64": slow_fp64, **constants}
    source = ASTSource(fn=variant.kernel, signature=types, constexprs=constants)
    return triton.compile(source, target=gpu, options=options_of(constants.get("BLOCK_SIZE", 0)))


@functools.cache
def facts(name: str, target: str) -> Compiled:
    made = compiled(name, target)
    asm = made.asm
    if target.startswith("gfx"):
        return _amd(asm["amdgcn"])
    from lab.emulators.triton_kernels import KERNELS

    variant = KERNELS[name]
    elements = variant.elements // (32 * made.metadata.num_warps)
    return _nvidia(asm["cubin"], asm["ptx"], elements, has_fast_path(variant))


def has_fast_path(variant: Any) -> bool:
    """memkern/triton/fast_path.py: a branch that usual tiles do not take."""
    from memkern.triton import codec

    of_adam = variant.kernel.__name__ in ("adam_tiles", "lamb_tiles", "lamb_norm_tiles")
    return of_adam and variant.constants["KIND"] == codec.POWER.value


def all_facts() -> dict[tuple[str, str], Compiled]:
    from lab.emulators.triton_kernels import CASES

    with multiprocessing.get_context("spawn").Pool(int(os.environ.get("MAX_JOBS", 2))) as pool:
        return dict(zip(CASES, pool.starmap(facts, CASES), strict=True))


# ---- machine code


def _tool(name: str, *args: str) -> str:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run([tools / name, *args], capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


def _nvidia(cubin: bytes, ptx: str, elements: int, fast_path: bool) -> Compiled:
    usage = _dumped(cubin, "-res-usage")
    number = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    accesses = re.findall(r"(?:ld|st)\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", ptx)
    widest = max(int(n or 1) * int(bits) for n, bits in accesses)
    code = _code(cubin)
    way = _main_path(code)
    if fast_path:
        # Both branches have the same accesses.
        wide = {key: sum({*key.split(".")} <= {*i.opcode.split(".")} for i in way) for key in WIDE}
        way = sass.shortest_loop(code, wide) or way
    per_element = round(len(way) / elements, 1) if elements else 0.0
    return Compiled(number["REG"], number["STACK"] + number["LOCAL"], widest, per_element)


def _dumped(cubin: bytes, what: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        return _tool("cuobjdump", what, str(file))


def _code(cubin: bytes) -> list[sass.Instruction]:
    (code,) = sass.parsed(_dumped(cubin, "-sass")).values()
    return code


def main_loop(name: str, target: str, wanted: dict[str, int]) -> list[sass.Instruction]:
    """A turn of a kernel's loop, by the shortest way that has the wanted wide loads and stores."""
    return sass.shortest_loop(_code(compiled(name, target).asm["cubin"]), wanted)


def _main_path(code: list[sass.Instruction]) -> list[sass.Instruction]:
    """One turn of the longest loop, past the calls that roots and divisions make for rare values.

    Of a kernel without a loop all up to its end, what it does once for its few elements included.
    """
    place = {i.address: n for n, i in enumerate(code)}
    jumps = {
        n: place[i.target]
        for n, i in enumerate(code)
        if i.opcode.split(".")[0] == "BRA" and i.target in place and place[i.target] != n
    }
    last, n = max(
        ((n, to) for n, to in jumps.items() if to < n),
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
    found = {
        (row["kernel"], row["target"]): (int(row["registers"]), float(row["instructions per parameter"]))
        for row in rows
    }
    return rows[0]["triton"], found


def write_record() -> None:
    facts_now = all_facts()
    with RECORD.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["kernel", "target", "registers", "instructions per parameter", "triton"])
        for case, found in facts_now.items():
            out.writerow([*case, found.registers, found.instructions, version()])


if __name__ == "__main__":
    write_record()
