"""Compiles every CUDA kernel for every architecture: registers, spills, and instructions on the main paths.

``python -m lab.emulators.cuda_kernels`` rewrites lab/results/cuda-kernels.json, which
lab/tests/test_cuda_kernels.py compares with.
"""

from __future__ import annotations

import functools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lab.emulators import sass
from tests.support import cache

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "lab" / "results" / "cuda-kernels.json"
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
COUNTED = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
FLAGS = [
    "-O3",
    "-std=c++20",
    "-fmad=false",
    "-Xptxas=-v",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
    "-DUSE_CUDA",
]

# Of a loop over sixteen-lane blocks of power codes: wide loads and stores, scales and shuffles of eight parameters.
# bf16 comes by copies to shared memory (LDGSTS), fp32 is loaded into registers, in two parts.
ADAM = {"LDG.64": 2, "STG.64": 2, "LDG": 4, "STG": 3, "SHFL": 7}
ADAM_FP32 = {"LDG.128": 4, "STG.128": 2, "LDG": 8, "STG": 6, "SHFL": 7, "MUFU": 34}
ADAM_BF16 = {"LDGSTS": 4, "STG.128": 1, "STG": 3, "SHFL": 7, "MUFU": 34}
LION_FP32 = {"LDG.128": 4, "STG.128": 2, "LDG": 6, "STG": 4, "SHFL": 5}
LION_BF16 = {"LDGSTS": 3, "STG.128": 1, "STG.64": 1, "STG": 2, "SHFL": 5, "F2FP.BF16": 4}
PATHS = {
    "AdamW fp32": ("adam_tiles<1, 0>", ADAM_FP32),
    "AdamW bf16": ("adam_tiles<1, 0>", ADAM_BF16 | {"STG.64": 2, "F2FP.BF16": 8}),
    "AdamW bf16+8": (
        "adam_tiles<1, 1>",
        ADAM | {"LDG.64": 3, "STG.64": 3, "LDG.128": 2, "STG.128": 1, "LDG": 5, "STG": 4},
    ),
    "AdamW bf16+16": (
        "adam_tiles<1, 1>",
        ADAM | {"LDG.128": 3, "STG.128": 2, "LDG": 5, "STG": 4},
    ),
    "Lion fp32": ("lion_tiles<1, 0>", LION_FP32),
    "Lion bf16": ("lion_tiles<1, 0>", LION_BF16),
    "LAMB norms fp32": ("lamb_norm_tiles<1, 0>", {"LDG.128": 4, "LDG": 8, "SHFL": 2, "MUFU": 16}),
    "LAMB norms bf16": ("lamb_norm_tiles<1, 0>", {"LDGSTS": 4, "SHFL": 2, "MUFU": 16}),
    "LAMB bf16": ("lamb_tiles<1, 0>", ADAM_BF16 | {"STG.64": 2, "F2FP.BF16": 4}),
    "LARS norms fp32": ("lars_norm_tiles<1, 0>", {"LDG.128": 4, "LDG": 6, "SHFL": 1, "F2F": 16}),
    "LARS norms bf16": ("lars_norm_tiles<1, 0>", {"LDGSTS": 3, "SHFL": 1, "F2F": 16}),
    "LARS fp32": ("lars_tiles<1, 0>", LION_FP32),
    "LARS bf16": ("lars_tiles<1, 0>", LION_BF16),
    "grad norm fp32": ("norm_tiles", {"LDG.128": 4}),
    "grad norm bf16": ("norm_tiles", {"LDG.128": 2}),
}
PATHS |= {
    "Muon momentum fp32": (
        "muon_tiles<1>",
        {"LDG.128": 2, "LDG.64": 1, "STG.64": 1, "STG.128": 1, "LDG": 3, "STG": 2, "SHFL": 5},
    ),
    "Muon momentum bf16": ("muon_tiles<1>", {"LDGSTS": 2, "STG.128": 1, "STG.64": 1, "STG": 2, "SHFL": 5}),
    "Muon apply fp32": ("muon_apply_tiles<0>", {"LDG.128": 3, "STG.128": 2}),
    "Muon apply bf16": ("muon_apply_tiles<0>", {"LDG.128": 2, "STG.128": 1}),
}
PATHS |= {
    "GELU 3-bit forward bf16": ("forward_by_table<0, 3>", {"LDG.128": 1, "STG.128": 1, "STG": 4, "LDS": 8}),
    "GELU 3-bit forward fp32": ("forward_by_planes<0, 0, 3>", {"LDG.128": 2, "STG.128": 2, "STG": 5}),
    "GELU 3-bit backward bf16": (
        "multiply_by_levels<1, 3>",
        {"LDG.128": 1, "STG.128": 1, "LDG": 4, "LDS.64": 4},
    ),
    "GELU 3-bit backward fp32": (
        "multiply_by_levels<0, 3>",
        {"LDG.128": 2, "STG.128": 2, "LDG": 5, "LDS.64": 4},
    ),
}
PATHS |= {  # of saved tensors: blocks of 128, rounded to the nearest
    "power codes fp32": ("quantize_full_blocks<0, 1>", {"LDG.128": 2, "STG.64": 1}),
    "power codes bf16": ("quantize_full_blocks<1, 1>", {"LDG.128": 1, "STG.64": 1}),
    "power values fp32": ("dequantize_full_blocks<0, 1>", {"LDG": 12, "STG.128": 8}),
    "power values bf16": ("dequantize_full_blocks<1, 1>", {"LDG.64": 4, "STG.128": 4, "F2FP.BF16": 16}),
}
# Iterations of a batch, whose scales are loaded and stored in a loop around theirs (csrc/cuda/main_path.cuh).
BATCHES = {
    path: 8 if path.startswith(("AdamW", "LAMB")) else 16
    for path in PATHS
    if path.startswith(("AdamW", "LAMB", "Lion", "LARS", "Muon momentum"))
}
PARAMETERS = 8  # or elements, that a lane has in one iteration of the loop
# Of several vectors that a lane has in one iteration.
VECTORS = {"grad norm fp32": 2, "grad norm bf16": 2, "power values fp32": 4, "power values bf16": 4}


def short_name(mangled: str) -> str:
    """adam_tiles<1, 0> for _ZN7memkern10adam_tilesILNS_9StateKindE1ELb0EEE...: the name and its constants."""
    rest = mangled.removeprefix("_ZN7memkern")
    while (length := re.match(r"\d+", rest)) is not None:
        name, rest = (
            rest[length.end() : length.end() + int(length[0])],
            rest[length.end() + int(length[0]) :],
        )
    found = re.match(r"I((?:L.*?E)+)E", rest)
    constants = re.findall(r"L(?:NS_\d+[A-Za-z]+E|[a-z])(\d+)E", found[1]) if found else []
    return name + (f"<{', '.join(constants)}>" if constants else "")


def nvcc_version() -> str:
    text = subprocess.run([str(nvcc()), "--version"], capture_output=True, text=True).stdout
    return re.search(r"V([\d.]+)", text)[1] if "V" in text else text  # type: ignore[index]


def nvcc() -> str | None:
    return shutil.which(os.environ.get("NVCC", "nvcc"))


def write_headers(folder: Path) -> None:
    """Those that setup.py writes, as it may not have run. By one thread: runpy changes sys.modules."""
    folder.mkdir(parents=True, exist_ok=True)
    runpy.run_path(str(ROOT / "csrc" / "generate.py"))["write_headers"](folder)


def includes(headers: Path) -> list[str]:
    """nvcc's arguments for the folders in which csrc/cuda finds headers, and those that were written."""
    import torch

    home = Path(torch.__file__).parent / "include"
    return [f"-I{path}" for path in (ROOT / "csrc", headers, home, home / "torch/csrc/api/include")]


def compile_for(arch: str, folder: Path) -> None:
    """Into ``folder``: the machine code, and as JSON each kernel's registers and bytes of stack and spills."""
    write_headers(folder)
    unit = folder / f"{arch}.cu"
    sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    unit.write_text("".join(f'#include "{source}"\n' for source in sources))
    binary = folder / f"{arch}.cubin"
    command = [str(nvcc()), *FLAGS, f"-arch={arch}", *includes(folder)]
    done = subprocess.run(
        [*command, "-cubin", "-o", str(binary), str(unit)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    (folder / f"{arch}.json").write_text(json.dumps(usage(done.stderr)))


def usage(messages: str) -> dict[str, dict[str, int]]:
    """What ptxas -v says of each kernel: registers, and bytes of stack and spills."""
    found = {}
    for part in messages.split("Compiling entry function '")[1:]:
        numbers = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        assert numbers, part
        assert registers, part
        stack, stores, loads = (int(n) for n in numbers.groups())
        found[short_name(part.split("'")[0])] = {
            "registers": int(registers[1]),
            "stack": stack,
            "spilled": stores + loads,
        }
    return found


Compiled = tuple[Path, dict[str, dict[str, int]]]


def compiled(arch: str) -> Compiled:
    """The machine code for an architecture, and what it needs."""
    folder = cache.built(arch, lambda folder: compile_for(arch, folder), FLAGS, nvcc_version())
    return folder / f"{arch}.cubin", json.loads((folder / f"{arch}.json").read_text())


Ways = dict[str, list[sass.Instruction]]


@functools.cache
def main_paths(binary: Path, arch: str) -> Ways:
    """The instructions of an iteration of each loop, from an architecture's machine code."""
    found = {}
    for path, (kernel, wanted) in PATHS.items():
        # ptxas for sm_100 and sm_120 has one approximate reciprocal more in each iteration of some loops.
        found[path] = _loop(_kernels(binary, arch)[kernel], wanted, arch, range(2))
        assert found[path], f"{arch}: no loop of {kernel} has {wanted}, which {path} is known by"
    return found


@functools.cache
def batches(binary: Path, arch: str) -> Ways:
    """Those of a batch of one iteration, with a load, a store and a division more; those of the iteration
    where there is no such way."""
    found = dict(main_paths(binary, arch))
    for path in BATCHES:
        kernel, wanted = PATHS[path]
        stored = 0 if "norms" in path else 1
        wanted = wanted | {"LDG": wanted.get("LDG", 0) + 1, "STG": wanted.get("STG", 0) + stored}
        way = _loop(_kernels(binary, arch)[kernel], wanted, arch, range(1, 4))
        if len(way) > len(found[path]):
            found[path] = way
    return found


def per_turn(binary: Path, arch: str, path: str) -> float:
    """The instructions of an iteration, with the iteration's part of a batch."""
    iteration = len(main_paths(binary, arch)[path])
    return iteration + (len(batches(binary, arch)[path]) - iteration) / BATCHES.get(path, 1)


@functools.cache
def _kernels(binary: Path, arch: str) -> Ways:
    return {short_name(name): kernel for name, kernel in sass.kernels(binary, arch).items()}


def _loop(code: list[sass.Instruction], wanted: dict[str, int], arch: str, more: range) -> list[sass.Instruction]:
    """The shortest way, with so many more approximate roots and reciprocals, of the first number that any has."""
    if arch in ("sm_89", "sm_120") and "F2F" in wanted:
        wanted = wanted | {"F2F": wanted["F2F"] // 4}  # csrc/cuda/squares.cuh
    if "MUFU" not in wanted:
        return sass.shortest_loop(code, wanted)
    ways = (sass.shortest_loop(code, wanted | {"MUFU": wanted["MUFU"] + n}) for n in more)
    return next(filter(None, ways), [])


def elements(path: str) -> int:
    """That a lane has in one iteration of the loop."""
    return VECTORS.get(path, 1) * PARAMETERS


def instructions(binary: Path, arch: str) -> dict[str, float]:
    """Instructions per element on the main paths."""
    return {path: per_turn(binary, arch, path) / elements(path) for path in PATHS}


def fp64_instructions(binary: Path, arch: str) -> dict[str, float]:
    """Those that the fp64 units execute, per element: sums, products and conversions."""
    counts = {
        path: sum(i.opcode.startswith(("DADD", "DMUL", "DFMA", "F2F.F64", "F2F.F32.F64")) for i in way)
        for path, way in main_paths(binary, arch).items()
    }
    return {path: count / elements(path) for path, count in counts.items() if count}


def measure() -> dict[str, Any]:
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
        of_arch = dict(zip(ARCHS, pool.map(compiled, ARCHS), strict=True))
    counted = {arch: instructions(of_arch[arch][0], arch) for arch in COUNTED}
    kernels = sorted({name for _, found in of_arch.values() for name in found})
    return {
        "nvcc": nvcc_version(),
        "registers": {
            kernel: {arch: found[kernel]["registers"] for arch, (_, found) in of_arch.items()} for kernel in kernels
        },
        "instructions per element": {path: {arch: counts[path] for arch, counts in counted.items()} for path in PATHS},
    }


if __name__ == "__main__":
    record = measure()
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    json.dump(record["instructions per element"], sys.stdout, indent=1)
