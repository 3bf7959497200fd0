"""Every case of the tables on every backend that tests/ can run: the reference's bits, and refused arguments.

The tables: tests/support/kernels/cases.py and refused.py. Emulated GPUs run them in lab/tests.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable
from typing import Any

import pytest
import torch

from memkern.schemas import SCHEMAS
from tests.support.helpers import INTERPRETED, assert_same
from tests.support.interpreted import interpreted
from tests.support.kernels.arguments import OPS
from tests.support.kernels.backends import BACKENDS, REFERENCE, Kernels, compare
from tests.support.kernels.cases import CASES
from tests.support.kernels.refused import FREED, REFUSED


def pairs(cases: Iterable[str], leave_out: Container[str] = ()) -> list[Any]:
    """Backends and the cases that they take."""
    return [
        pytest.param(backend, name, marks=[*kernels.marks, *([pytest.mark.full] if full else [])])
        for name in cases  # the reference's results are those of the last case
        for backend, kernels in BACKENDS.items()
        if backend not in leave_out and (name not in CASES or kernels.takes(CASES[name]))
        for full in [name in CASES and CASES[name].full]
    ]


@pytest.fixture
def kernels(backend: str, request: pytest.FixtureRequest) -> Kernels:
    if backend.startswith("simt"):
        request.getfixturevalue("simt_library")
    return BACKENDS[backend]


@interpreted()
@pytest.mark.parametrize(("backend", "case"), pairs(CASES, leave_out=["reference"]))
def test_cases(kernels: Kernels, case: str) -> None:
    torch.set_num_threads(2 if "two threads" in case else 1)
    compare(kernels, CASES[case])


ONE_OF_EACH = {"avx2", "avx512", "neon", "simt-rev", "simt-rand"}


@interpreted()
@pytest.mark.parametrize(("backend", "case"), pairs(REFUSED, leave_out=ONE_OF_EACH))
def test_bad_arguments_change_nothing(kernels: Kernels, case: str) -> None:
    op, make, message = REFUSED[case]
    args = kernels.to(make())
    before = copy.deepcopy(args)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        kernels.call(op, *args)
    assert_same(kernels.back(args), kernels.back(before))


ON_CPU = ONE_OF_EACH | {"reference", "cuda", *([] if INTERPRETED else ["triton"])}


@interpreted()
@pytest.mark.parametrize(("backend", "case"), pairs(FREED, leave_out=ON_CPU))
def test_freed_memory_is_an_error(kernels: Kernels, case: str) -> None:
    op, make, _ = FREED[case]
    with pytest.raises(RuntimeError, match="has no memory: its storage has been freed"):
        kernels.call(op, *make())


@pytest.mark.parametrize("op", OPS)
def test_a_skipped_step_changes_nothing(op: str) -> None:
    (args,) = CASES[f"{op}: skipped"].calls()
    before = copy.deepcopy(args)
    REFERENCE.call(op, *args)
    if op == "muon_momentum_":
        assert not any(total.any() for total in args[1])
        args[1] = before[1]
    assert_same(args, before)


def test_every_op_has_cases() -> None:
    for table in (CASES, REFUSED):
        assert {case.op for case in table.values()} == {*SCHEMAS}
