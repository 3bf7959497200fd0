"""Compiles every CUDA kernel for every architecture; reads its registers, spills, and instructions on the main paths.

``python -m lab.emulators.cuda_kernels`` writes lab/results/cuda-kernels.json, with which
lab/tests/test_cuda_kernels.py compares what is compiled now.
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
COUNTED = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")  # whose instructions are counted
FLAGS = [
    "-O3",
    "-std=c++20",
    "-fmad=false",
    "-Xptxas=-v",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
    "-DUSE_CUDA",
]

# How often an opcode is in an iteration of a main loop, by which the loop is found: wide loads and stores, those of
# scales, and shuffles, for eight parameters of each lane. Sixteen lanes share a block of power codes. bf16 is copied to
# shared memory (LDGSTS), fp32 is loaded into registers, in two parts.
ADAM = {"LDG.64": 2, "STG.64": 2, "LDG": 4, "STG": 3, "SHFL": 7}
ADAM_FP32 = {"LDG.128": 4, "STG.128": 2, "LDG": 8, "STG": 6, "SHFL": 7, "MUFU": 34}
ADAM_BF16 = {"LDGSTS": 4, "STG.128": 1, "STG": 3, "SHFL": 7, "MUFU": 34}
LION_FP32 = {"LDG.128": 4, "STG.128": 2, "LDG": 6, "STG": 4, "SHFL": 5}
LION_BF16 = {"LDGSTS": 3, "STG.128": 1, "STG.64": 1, "STG": 2, "SHFL": 5, "F2FP.BF16": 4}
PATHS = {  # main path: kernel, opcodes in an iteration of its loop
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
PATHS |= {  # codes of saved tensors: blocks of 128, rounded to the nearest
    "power codes fp32": ("quantize_full_blocks<0, 1>", {"LDG.128": 2, "STG.64": 1}),
    "power codes bf16": ("quantize_full_blocks<1, 1>", {"LDG.128": 1, "STG.64": 1}),
    "power values fp32": ("dequantize_full_blocks<0, 1>", {"LDG": 12, "STG.128": 8}),
    "power values bf16": ("dequantize_full_blocks<1, 1>", {"LDG.64": 4, "STG.128": 4, "F2FP.BF16": 16}),
}
# Iterations in a batch: an outer loop loads and stores the scales of a batch at once (csrc/cuda/main_path.cuh).
BATCHES = {
    path: 8 if path.startswith(("AdamW", "LAMB")) else 16
    for path in PATHS
    if path.startswith(("AdamW", "LAMB", "Lion", "LARS", "Muon momentum"))
}
PARAMETERS = 8  # or elements, in a vector
# Vectors that a lane has in one iteration of the loop, where it is more than one.
VECTORS = {"grad norm fp32": 2, "grad norm bf16": 2, "power values fp32": 4, "power values bf16": 4}


def short_name(mangled: str) -> str:
    """A kernel's name and constants: adam_tiles<1, 0> for _ZN7memkern10adam_tilesILNS_9StateKindE1ELb0EEE..."""
    rest = mangled.removeprefix("_ZN7memkern")
    while (length := re.match(r"\d+", rest)) is not None:  # a name is preceded by its length
        start, end = length.end(), length.end() + int(length[0])
        name, rest = rest[start:end], rest[end:]
    template = re.match(r"I((?:L.*?E)+)E", rest)
    constants = re.findall(r"L(?:NS_\d+[A-Za-z]+E|[a-z])(\d+)E", template[1]) if template else []
    return name + (f"<{', '.join(constants)}>" if constants else "")


def nvcc_version() -> str:
    text = subprocess.run([str(nvcc()), "--version"], capture_output=True, text=True).stdout
    return re.search(r"V([\d.]+)", text)[1] if "V" in text else text  # type: ignore[index]


def nvcc() -> str | None:
    return shutil.which(os.environ.get("NVCC", "nvcc"))


def write_headers(folder: Path) -> None:
    """Writes the headers that setup.py writes, as it may not have run. For one thread: runpy changes sys.modules."""
    folder.mkdir(parents=True, exist_ok=True)
    runpy.run_path(str(ROOT / "csrc" / "generate.py"))["write_headers"](folder)


def includes(headers: Path) -> list[str]:
    """nvcc's arguments for the folders of headers; ``headers`` is the one that write_headers filled."""
    import torch

    home = Path(torch.__file__).parent / "include"
    return [f"-I{path}" for path in (ROOT / "csrc", headers, home, home / "torch/csrc/api/include")]


def compile_for(arch: str, folder: Path) -> None:
    """Writes to ``folder`` the machine code, and as JSON each kernel's registers and bytes of stack and spills."""
    write_headers(folder)
    unit = folder / f"{arch}.cu"
    sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    unit.write_text("".join(f'#include "{source}"\n' for source in sources))
    binary = folder / f"{arch}.cubin"
    command = [str(nvcc()), *FLAGS, f"-arch={arch}", *includes(folder)]
    compilation = subprocess.run(
        [*command, "-cubin", "-o", str(binary), str(unit)], capture_output=True, text=True, check=False
    )
    assert compilation.returncode == 0, compilation.stderr[-6000:]
    (folder / f"{arch}.json").write_text(json.dumps(usage(compilation.stderr)))


def usage(messages: str) -> dict[str, dict[str, int]]:
    """Each kernel's registers and bytes of stack and spills, from the messages of ptxas -v."""
    kernels = {}
    for part in messages.split("Compiling entry function '")[1:]:
        numbers = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        assert numbers, part
        assert registers, part
        stack, stores, loads = (int(n) for n in numbers.groups())
        kernels[short_name(part.split("'")[0])] = {
            "registers": int(registers[1]),
            "stack": stack,
            "spilled": stores + loads,
        }
    return kernels


Compiled = tuple[Path, dict[str, dict[str, int]]]


def compiled(arch: str) -> Compiled:
    """The file of an architecture's machine code, and each kernel's registers, stack and spills."""
    folder = cache.built(arch, lambda folder: compile_for(arch, folder), FLAGS, nvcc_version())
    return folder / f"{arch}.cubin", json.loads((folder / f"{arch}.json").read_text())


Paths = dict[str, list[sass.Instruction]]  # instructions by name of a path or kernel


@functools.cache
def main_paths(binary: Path, arch: str) -> Paths:
    """The instructions of an iteration on each main path, from an architecture's machine code."""
    loops = {}
    for path, (kernel, wanted) in PATHS.items():
        # ptxas for sm_100 and sm_120 has one approximate reciprocal more in each iteration of some loops.
        loops[path] = _loop(_kernels(binary, arch)[kernel], wanted, arch, range(2))
        assert loops[path], f"{arch}: no loop of {kernel} has {wanted}, which {path} is known by"
    return loops


@functools.cache
def batches(binary: Path, arch: str) -> Paths:
    """The instructions of a batch of one iteration, which has a load, a store and a division more than the iteration.

    Where no loop has these, the instructions of the iteration."""
    loops = dict(main_paths(binary, arch))
    for path in BATCHES:
        kernel, wanted = PATHS[path]
        stored = 0 if "norms" in path else 1
        wanted = wanted | {"LDG": wanted.get("LDG", 0) + 1, "STG": wanted.get("STG", 0) + stored}
        batch = _loop(_kernels(binary, arch)[kernel], wanted, arch, range(1, 4))
        if len(batch) > len(loops[path]):
            loops[path] = batch
    return loops


def per_iteration(binary: Path, arch: str, path: str) -> float:
    """The instructions of an iteration, with its share of what is executed once per batch."""
    iteration = len(main_paths(binary, arch)[path])
    return iteration + (len(batches(binary, arch)[path]) - iteration) / BATCHES.get(path, 1)


@functools.cache
def _kernels(binary: Path, arch: str) -> Paths:
    return {short_name(name): kernel for name, kernel in sass.kernels(binary, arch).items()}


def _loop(code: list[sass.Instruction], wanted: dict[str, int], arch: str, extra: range) -> list[sass.Instruction]:
    """The shortest loop with the wanted opcodes and ``extra`` approximations (MUFU) more: the first that exists."""
    if arch in ("sm_89", "sm_120") and "F2F" in wanted:
        wanted = wanted | {"F2F": wanted["F2F"] // 4}  # squares are summed by fours there: csrc/cuda/squares.cuh
    if "MUFU" not in wanted:
        return sass.shortest_loop(code, wanted)
    loops = (sass.shortest_loop(code, wanted | {"MUFU": wanted["MUFU"] + n}) for n in extra)
    return next(filter(None, loops), [])


def elements(path: str) -> int:
    """The elements that a lane has in one iteration of the path's loop."""
    return VECTORS.get(path, 1) * PARAMETERS


def instructions(binary: Path, arch: str) -> dict[str, float]:
    """Instructions per element on the main paths."""
    return {path: per_iteration(binary, arch, path) / elements(path) for path in PATHS}


def fp64_instructions(binary: Path, arch: str) -> dict[str, float]:
    """Instructions per element that the fp64 units execute, on the paths that have any: sums, products, conversions."""
    counts = {
        path: sum(i.opcode.startswith(("DADD", "DMUL", "DFMA", "F2F.F64", "F2F.F32.F64")) for i in code)
        for path, code in main_paths(binary, arch).items()
    }
    return {path: count / elements(path) for path, count in counts.items() if count}


def measure() -> dict[str, Any]:
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
        builds = dict(zip(ARCHS, pool.map(compiled, ARCHS), strict=True))
    counted = {arch: instructions(builds[arch][0], arch) for arch in COUNTED}
    kernels = sorted({name for _, usages in builds.values() for name in usages})
    return {
        "nvcc": nvcc_version(),
        "registers": {
            kernel: {arch: usages[kernel]["registers"] for arch, (_, usages) in builds.items()} for kernel in kernels
        },
        "instructions per element": {path: {arch: counts[path] for arch, counts in counted.items()} for path in PATHS},
    }


if __name__ == "__main__":
    record = measure()
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    json.dump(record["instructions per element"], sys.stdout, indent=1)
