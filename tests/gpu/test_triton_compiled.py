"""Every Triton kernel, compiled for every target: no spills, 16-byte accesses, registers as recorded."""

from __future__ import annotations

import pytest

from memkern import backend
from tests.support.triton_compile import Compiled, all_facts, recorded, version

if missing := backend.available()["triton"]:
    pytest.skip(missing, allow_module_level=True)

from tests.support.triton_kernels import CASES, KERNELS

pytestmark = pytest.mark.slow
CHANGE = 0.1

# Instructions that a GPU of the H200's kind has time for while it moves a parameter's bytes (FLOOR_OF), at 4.3 TB/s.
BUDGET = {"adam: power, fp32": 111, "lion: power, fp32": 97, "lion: power, bf16": 55}


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, str], Compiled]:
    return all_facts()


@pytest.mark.parametrize(("name", "target"), CASES)
def test_compiles_without_spills(name: str, target: str, compiled: dict[tuple[str, str], Compiled]) -> None:
    found = compiled[name, target]
    assert found.scratch == 0, f"{found.scratch} bytes of local memory: spills, or an array that is indexed"
    assert 0 < found.registers <= 255
    if KERNELS[name].constants.get("VECTOR", 1) > 1:
        assert found.widest == 128, f"the widest access has {found.widest} bits"


@pytest.mark.parametrize(("name", "target"), CASES)
def test_registers_are_as_recorded(name: str, target: str, compiled: dict[tuple[str, str], Compiled]) -> None:
    of_version, record = recorded()
    if version() != of_version:
        pytest.skip(f"recorded with Triton {of_version}, this is {version()}")
    assert (name, target) in record, (
        "new kernel: run python -m tests.support.triton_compile, and look at what it writes"
    )
    registers, instructions = record[name, target]
    for what, now, then in (
        ("registers", compiled[name, target].registers, registers),
        ("instructions per parameter", compiled[name, target].instructions, instructions),
    ):
        assert abs(now - then) <= CHANGE * then, (
            f"{now} {what}, recorded were {then}. If that is meant, run python -m tests.support.triton_compile"
        )


def test_nothing_else_is_recorded() -> None:
    assert {*recorded()[1]} == {*CASES}


@pytest.mark.parametrize("name", BUDGET)
def test_instructions_fit_the_memory(name: str, compiled: dict[tuple[str, str], Compiled]) -> None:
    assert compiled[name, "sm_90"].instructions <= BUDGET[name]
