"""Every CUDA kernel compiled for every architecture: no spills, no local memory, and no surprise in its registers.

lab/results/cuda-kernels.json holds the registers, and the instructions per parameter or element of the main paths.
What changes by more than a tenth is to be looked at; then ``python -m lab.emulators.cuda_kernels`` writes the new
numbers.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from lab.emulators import cuda_kernels, sass

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(cuda_kernels.nvcc() is None, reason="nvcc is not installed"),
]


def over(archs: tuple[str, ...]) -> Any:
    return pytest.mark.parametrize(
        "arch",
        [pytest.param(arch, marks=pytest.mark.full if arch == "sm_90" else pytest.mark.long) for arch in archs],
    )


over_archs, over_counted = over(cuda_kernels.ARCHS), over(cuda_kernels.COUNTED)
UPDATE = "look at why, then run python -m lab.emulators.cuda_kernels"
TENTH = 0.1
RECORD = json.loads(cuda_kernels.RECORD.read_text())
# An H200 copies 4.3 TB/s; 132 multiprocessors issue four warps' instructions a cycle at 1.98 GHz. What a parameter's
# 16.13 and 10.13 bytes leave time for; an element of an activation has 4.375 in bf16 and 8.375 in fp32.
BUDGET = {
    **{"AdamW fp32": 125, "AdamW bf16": 79, "Lion fp32": 109, "Lion bf16": 63},
    **{"AdamW bf16+8": 94, "AdamW bf16+16": 110},  # 12.13 and 14.13 bytes
    **{"LAMB norms fp32": 78, "LAMB norms bf16": 47, "LAMB bf16": 79},  # 10.06, 6.06 and 10.13 bytes
    **{"LARS norms fp32": 70, "LARS norms bf16": 39},  # 9.03 and 5.03 bytes
    **{"LARS fp32": 109, "LARS bf16": 63, "grad norm fp32": 31, "grad norm bf16": 16},
    **{"Muon momentum fp32": 62, "Muon momentum bf16": 47},  # 8.06 and 6.06 bytes
    **{"Muon apply fp32": 77, "Muon apply bf16": 46},  # 10 and 6 bytes
    **{"power codes fp32": 39, "power codes bf16": 23, "power values fp32": 39, "power values bf16": 23},
    **{"GELU 3-bit forward bf16": 34, "GELU 3-bit backward bf16": 34},
    **{"GELU 3-bit forward fp32": 65, "GELU 3-bit backward fp32": 65},
}
# What they were brought down to, with two or three for vectors that are on their way and, in registers, five for
# gradients that start anywhere and rows that end inside a block of 128.
LIMIT = {
    **{**BUDGET, "AdamW fp32": 70, "AdamW bf16": 57, "Lion fp32": 43, "Lion bf16": 41, "LAMB norms bf16": 45},
    **{"LAMB norms fp32": 48, "LAMB bf16": 66, "LARS fp32": 38, "LARS bf16": 35, "Muon momentum bf16": 30},
    **{"power codes bf16": 19, "GELU 3-bit forward fp32": 39},
}


def recorded(key: str) -> dict[str, Any]:
    if cuda_kernels.nvcc_version() != RECORD["nvcc"]:
        pytest.skip(f"{cuda_kernels.RECORD.name} is of nvcc {RECORD['nvcc']}")
    return RECORD[key]


@over_archs
def test_nothing_is_spilled(arch: str) -> None:
    _, found = cuda_kernels.compiled(arch)
    assert found
    for kernel, numbers in found.items():
        assert numbers["stack"] == numbers["spilled"] == 0, f"{kernel}: {numbers}"


@over_archs
def test_registers_are_those_on_record(arch: str) -> None:
    record = recorded("registers")
    found = {kernel: numbers["registers"] for kernel, numbers in cuda_kernels.compiled(arch)[1].items()}
    assert {*found} == {*record}, f"other kernels than on record; {UPDATE}"
    for kernel, registers in found.items():
        before = record[kernel][arch]
        assert abs(registers - before) <= TENTH * before, f"{kernel}: {registers}, not {before}; {UPDATE}"


@over_counted
@pytest.mark.skipif(sass.tool("cuobjdump") is None, reason="cuobjdump is not installed")
def test_instructions_are_those_on_record(arch: str) -> None:
    record = recorded("instructions per element")
    for path, count in cuda_kernels.instructions(cuda_kernels.compiled(arch)[0], arch).items():
        assert count > 0, f"{path}: no loop moves these bytes; {UPDATE} with the paths in cuda_kernels.py mended"
        before = record[path][arch]
        assert abs(count - before) <= TENTH * before, f"{path}: {count}, not {before}; {UPDATE}"
        if arch == "sm_90" and path in LIMIT:  # not the slow paths
            assert count <= LIMIT[path], f"{path}: {count} instructions per element, {BUDGET[path]} fit"


@over_counted
@pytest.mark.skipif(sass.tool("cuobjdump") is None, reason="cuobjdump is not installed")
def test_few_fp64_instructions_where_they_are_slow(arch: str) -> None:
    """csrc/cuda/squares.cuh: a square takes two, or a fourth of that, and an element of LAMB or LARS has two."""
    found = cuda_kernels.fp64_instructions(cuda_kernels.compiled(arch)[0], arch)
    each = 0.5 if arch in ("sm_89", "sm_120") else 2.0
    assert found == {
        **dict.fromkeys(("grad norm fp32", "grad norm bf16"), each),
        **dict.fromkeys((f"{name} norms {dtype}" for name in ("LAMB", "LARS") for dtype in ("fp32", "bf16")), 2 * each),
    }


ONE_MOMENT = ("Lion fp32", "Lion bf16", "LARS norms fp32", "LARS norms bf16", "LARS fp32", "LARS bf16")


@over_counted
@pytest.mark.skipif(sass.tool("cuobjdump") is None, reason="cuobjdump is not installed")
def test_loads_are_a_vector_ahead(arch: str) -> None:
    """Parameters, gradients, codes and scales of the next vector are asked for before anything waits for those of this
    one."""
    ways = cuda_kernels.main_paths(cuda_kernels.compiled(arch)[0], arch)
    adam = ("AdamW fp32", "AdamW bf16")
    for path in (
        *adam,
        "LAMB bf16",
        "LAMB norms fp32",
        "LAMB norms bf16",
        *ONE_MOMENT,
    ):
        way = ways[path]
        assert sass.loads_before_use(way), path
        # None of the turn's loads is waited for before its end: `arrived` in csrc/cuda/tile.cuh.
        # LARS's norms in fp32 have turns of 151 to 175 instructions, and 43 to 78 of them up to the last load.
        least = 0.4 if path == "LARS norms fp32" else 0.7
        assert sass.in_flight(way) > least * len(way), f"{path}: {sass.in_flight(way)} of {len(way)}"
        # Before its last load each loop computes addresses, copies the vector that the turn before has loaded, and has
        # the words of a gradient that starts anywhere: 30 to 87 instructions, of 445 to 547 in Adam and 134 to 378 in
        # the others; fp32 has two loads of each code, as its vectors are in parts.
        share = 7 if path in adam else 2 if path == "LARS norms fp32" else 3
        assert max(n for n, i in enumerate(way) if i.opcode.startswith("LDG")) < len(way) / share, path


def test_share_of_parameters_in_doubt() -> None:
    """What docs/numerics.md says of bf16 parameters: changes that are 2^-20 apart, rounded to different ones."""
    generator = torch.Generator().manual_seed(0)
    p, change = torch.randn(2, 8192, 256, generator=generator, dtype=torch.float64)
    p = (p * 0.02).bfloat16().double()
    change *= 1e-3 * (0.1 / 1.9) ** 0.5  # lr m / sqrt(v) of random gradients
    less, more = ((p - change * (1 + off)).float().bfloat16() for off in (-(2**-20), 2**-20))
    share = float((less != more).any(1).double().mean())
    assert share == pytest.approx(0.011, rel=0.4)  # four standard deviations
