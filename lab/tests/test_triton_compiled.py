"""Every Triton kernel, compiled for every target, has no spills, 16-byte accesses, and registers as recorded."""

from __future__ import annotations

import pytest

from lab.emulators import sass
from lab.emulators.triton_compile import facts, main_loop, recorded, version
from memkern import backend

if missing := backend.available()["triton"]:
    pytest.skip(missing, allow_module_level=True)

from lab.emulators.triton_kernels import CASES, KERNELS

pytestmark = pytest.mark.emulated

MAIN = ("sm_90", "gfx942")  # the other targets are tested by `make test-long`
over_cases = pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param(*case, marks=pytest.mark.full if case[1] in MAIN else pytest.mark.long, id="-".join(case))
        for case in CASES
    ],
)
CHANGE = 0.1  # by which a number may differ from the recorded one

# Instructions for which an H200 has time per byte: 132 multiprocessors issue those of four warps (128 lanes) a cycle at
# 1.98 GHz, and it copies 4.3 TB/s.
PER_BYTE = 132 * 128 * 1.98e9 / 4.3e12
# Bytes read and written per parameter or element, with scales of blocks of 128.
BYTES = {
    **{"adam: power, fp32": 16.13, "adam: power, bf16": 10.13, "adam: power, bf16+8": 12.13},
    "adam: power, bf16+16": 14.13,
    **{f"{name}: power, fp32": 14.06 for name in ("lion", "sgd", "lars")},
    **{f"{name}: power, bf16": 8.06 for name in ("lion", "sgd", "lars")},
    **{"lamb: power, fp32": 16.13, "lamb: power, bf16": 10.13},
    **{"muon: power, bf16": 6.06, "muon: power, bf16 and fp32": 8.06},
    **{"muon apply: fp32": 10, "muon apply: bf16": 6, "muon apply: bf16+8": 8},
    **{"lamb norms: power, fp32": 10.06, "lamb norms: power, bf16": 6.06, "norm: squares, fp32": 4},
    **{"quantize: power, signed, fp32": 5.03, "quantize: power, unsigned, bf16": 3.03},
    **{"dequantize: power, signed, fp32": 5.03, "dequantize: power, unsigned, bf16": 3.03},
    **{"few_bit: encode, bf16": 2.375, "few_bit: gelu, bf16": 4.375, "few_bit: gelu, fp32": 8.375},
    **{"few_bit: gelu_tanh, bf16": 4.375, "few_bit: silu, bf16": 4.375},
    **{"few_bit: backward, bf16": 4.375, "few_bit: backward, fp32": 8.375},
    **{"few_bit: backward from output, bf16": 6.125, "few_bit: backward from output, fp32": 12.125},
}
# Limits of kernels with more instructions than fit. A second root or a division takes 15, with a test of each element
# for rare values. Adam and LAMB test once per tile (memkern/triton/fast_path.py), which takes 2 to 3 for the tile's
# extremes, and then take 5 and 7. CUDA's bf16 kernels also compute parameters from approximate roots. SiLU has a
# division, "from output" a root and a choice between two branches' coefficients, and codes of bf16 the rounding.
ABOVE = {
    **{"lamb: power, bf16": 83, "lamb norms: power, bf16": 58},
    **{"quantize: power, unsigned, bf16": 34.5, "few_bit: encode, bf16": 19.5},
    **{"few_bit: silu, bf16": 48, "few_bit: backward from output, bf16": 62.5},
}


@over_cases
def test_compiles_without_spills(name: str, target: str) -> None:
    kernel = facts(name, target)
    assert kernel.scratch == 0, f"{kernel.scratch} bytes of local memory: spills, or an array that is indexed"
    assert 0 < kernel.registers <= 255
    if KERNELS[name].constants.get("VECTOR", 1) > 1:
        assert kernel.widest == 128, f"the widest access has {kernel.widest} bits"


def record_or_skip() -> dict[tuple[str, str], tuple[int, float]]:
    recorded_version, record = recorded()
    if version() != recorded_version:
        pytest.skip(f"recorded with Triton {recorded_version}, this is {version()}")
    return record


@over_cases
def test_registers_are_as_recorded(name: str, target: str) -> None:
    record = record_or_skip()
    assert (name, target) in record, (
        "new kernel: run python -m lab.emulators.triton_compile, and look at what it writes"
    )
    registers, instructions = record[name, target]
    for figure, current, before in (
        ("registers", facts(name, target).registers, registers),
        ("instructions per parameter", facts(name, target).instructions, instructions),
    ):
        assert abs(current - before) <= CHANGE * before, (
            f"{current} {figure}, recorded were {before}. If that is meant, run python -m lab.emulators.triton_compile"
        )


@pytest.mark.full
def test_the_record_has_these_cases_alone() -> None:
    assert {*recorded()[1]} == {*CASES}


@pytest.mark.full
@pytest.mark.parametrize("name", BYTES)
def test_instructions_fit_the_memory(name: str) -> None:
    fits = BYTES[name] * PER_BYTE
    assert (name in ABOVE) == (ABOVE.get(name, 0) > fits), f"{name}: {fits:.0f} fit"
    assert facts(name, "sm_90").instructions <= ABOVE.get(name, fits)


# Wide loads and stores in a loop's iteration for eight parameters of each thread, by which the loop is found.
FP32, BF16 = {"LDG.128": 4, "STG.128": 2}, {"LDG.128": 2, "STG.128": 1}
NORMS = {"LDG.128": 4}, {"LDG.128": 2}
LOOPS = {
    **{f"{optimizer}: power, fp32": FP32 for optimizer in ("adam", "lamb", "lion")},
    **{f"{optimizer}: power, bf16": BF16 for optimizer in ("adam", "lamb", "lion")},
    **{f"lamb norms: power, {dtype}": loads for dtype, loads in zip(("fp32", "bf16"), NORMS, strict=True)},
}


# Loads that ptxas places after arithmetic on another load's result: some of a tile's second row. A barrier would keep
# Lion's together, at 64 registers instead of 56. fp32 leaves time for it: of the 125 instructions that fit, Adam has 86
# and LAMB 90.
LATE = {"lion: power, fp32": 1, "adam: power, fp32": 2, "lamb: power, fp32": 4}


@pytest.mark.full
@pytest.mark.parametrize("name", LOOPS)
def test_loads_do_not_wait_for_each_other(name: str) -> None:
    """Parameters, gradients and codes are loaded before anything waits for a scale, but for LATE."""
    path = main_loop(name, "sm_90", LOOPS[name])
    assert sass.late_loads(path) == LATE.get(name, 0)
    # The figure of facts() may be up to a tenth more: it counts coupled weight decay, which a branch can skip.
    assert 0.9 * facts(name, "sm_90").instructions <= len(path) / 8 <= facts(name, "sm_90").instructions + 0.1


# In a loop's iteration for eight elements of each thread: wide loads, by which the loop is found, and sums of squares.
SQUARES = {
    "norm: squares, fp32": ({"LDG.128": 2}, 1),
    "lamb norms: power, fp32": ({"LDG.128": 4}, 2),
    "lamb norms: power, bf16": ({"LDG.128": 2}, 2),
    "lars norms: power, bf16": ({"LDG.128": 2}, 2),
}


@pytest.mark.full
@pytest.mark.parametrize(("target", "per_element"), [("sm_89", 0.5), ("sm_90", 3), ("sm_120", 0.5)])
@pytest.mark.parametrize("name", SQUARES)
def test_squares_take_few_fp64_instructions(name: str, target: str, per_element: float) -> None:
    """An element takes a conversion, a product and a sum in fp64; where it is slow, four take one and a sum."""
    record_or_skip()
    loads, sums = SQUARES[name]
    opcodes = [i.opcode.split(".") for i in main_loop(name, target, loads)]
    names = [name for name, *_ in opcodes]
    in_fp64 = sum(name in ("DADD", "DMUL", "DFMA") or (name == "F2F" and "F64" in rest) for name, *rest in opcodes)
    assert in_fp64 == 8 * sums * per_element
    # Where fp64 is slow a tile's largest magnitude is found first; fours are summed in a thread's registers.
    maxima = 0 if per_element == 3 else sums
    if name.startswith("lamb"):  # the warps of a tile agree on its range (memkern/triton/fast_path.py)
        assert [names.count(x) for x in ("STS", "LDS")] == [maxima + 1, maxima + 1]
    else:
        counts = [names.count(x) for x in ("SHFL", "REDUX", "STS", "LDS")]
        assert counts == [0, 2 * maxima, maxima, maxima]
