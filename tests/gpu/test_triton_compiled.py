"""Every Triton kernel, compiled for every target: no spills, 16-byte accesses, registers as recorded."""

from __future__ import annotations

import pytest

from memkern import backend
from tests.support.triton_compile import facts, recorded, version

if missing := backend.available()["triton"]:
    pytest.skip(missing, allow_module_level=True)

from tests.support.triton_kernels import CASES, KERNELS

MAIN = ("sm_90", "gfx942")  # the others when asked for, with `make test-long`
over_cases = pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param(
            *case, marks=pytest.mark.full if case[1] in MAIN else pytest.mark.long, id="-".join(case)
        )
        for case in CASES
    ],
)
CHANGE = 0.1

# Instructions that a GPU of the H200's kind has time for while it moves a parameter's bytes (FLOOR_OF), at 4.3 TB/s.
BUDGET = {"adam: power, fp32": 111, "lion: power, fp32": 97, "lion: power, bf16": 55}


@over_cases
def test_compiles_without_spills(name: str, target: str) -> None:
    found = facts(name, target)
    assert found.scratch == 0, f"{found.scratch} bytes of local memory: spills, or an array that is indexed"
    assert 0 < found.registers <= 255
    if KERNELS[name].constants.get("VECTOR", 1) > 1:
        assert found.widest == 128, f"the widest access has {found.widest} bits"


@over_cases
def test_registers_are_as_recorded(name: str, target: str) -> None:
    of_version, record = recorded()
    if version() != of_version:
        pytest.skip(f"recorded with Triton {of_version}, this is {version()}")
    assert (name, target) in record, (
        "new kernel: run python -m tests.support.triton_compile, and look at what it writes"
    )
    registers, instructions = record[name, target]
    for what, now, then in (
        ("registers", facts(name, target).registers, registers),
        ("instructions per parameter", facts(name, target).instructions, instructions),
    ):
        assert abs(now - then) <= CHANGE * then, (
            f"{now} {what}, recorded were {then}. If that is meant, run python -m tests.support.triton_compile"
        )


@pytest.mark.full
def test_nothing_else_is_recorded() -> None:
    assert {*recorded()[1]} == {*CASES}


@pytest.mark.full
@pytest.mark.parametrize("name", BUDGET)
def test_instructions_fit_the_memory(name: str) -> None:
    assert facts(name, "sm_90").instructions <= BUDGET[name]
