"""Every backend that tests/ can run gives the reference's bits in every case, and refuses every bad argument.

The tables of cases are tests/support/kernels/cases.py and refused.py. Emulated GPUs run them in lab/tests.
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
    """Parameters (backend, case): each case by every backend that takes it, but for those left out."""
    params = []
    for name in cases:  # the outer loop, as only the last cases' results of the reference are kept
        case = CASES.get(name)
        full = [pytest.mark.full] if case and case.full else []
        for backend, kernels in BACKENDS.items():
            if backend not in leave_out and (case is None or kernels.takes(case)):
                params.append(pytest.param(backend, name, marks=[*kernels.marks, *full]))
    return params


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


SAME_CHECKS = {"avx2", "avx512", "neon", "simt-rev", "simt-rand"}  # as of generic and of simt-fwd


@interpreted()
@pytest.mark.parametrize(("backend", "case"), pairs(REFUSED, leave_out=SAME_CHECKS))
def test_bad_arguments_change_nothing(kernels: Kernels, case: str) -> None:
    op, make, message = REFUSED[case]
    args = kernels.to(make())
    before = copy.deepcopy(args)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        kernels.call(op, *args)
    assert_same(kernels.back(args), kernels.back(before))


# The reference has no such check, and the tensors are on the CPU.
NO_CHECK = SAME_CHECKS | {"reference", "cuda", *([] if INTERPRETED else ["triton"])}


@interpreted()
@pytest.mark.parametrize(("backend", "case"), pairs(FREED, leave_out=NO_CHECK))
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
        assert not any(sums.any() for sums in args[1])  # sums of squares, of which a skipped step makes zeros
        args[1] = before[1]
    assert_same(args, before)


def test_every_op_has_cases() -> None:
    for table in (CASES, REFUSED):
        assert {case.op for case in table.values()} == {*SCHEMAS}
