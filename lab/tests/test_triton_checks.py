"""Triton's compiled kernels have no races, reads of unwritten bytes, partial barriers or accesses out of bounds.

Every access is checked in the PTX emulator, as lab/tests/test_cuda_checks.py does for CUDA's. Results are compared too,
with other bits in reads that race. Faults planted in the kernels are found.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from lab.emulators import triton_ptx
from lab.emulators.ptx_checks import ORDERS, InitError, RaceError
from lab.emulators.ptx_emulator import PtxError
from lab.emulators.triton_checks import BARRIER, FEW, SHUFFLE, STORE, WIDE_LOAD, Watch, WatchedOps, edit
from memkern import _ops
from memkern.schemas import SCHEMAS
from tests.support.kernels.backends import Kernels, compare
from tests.support.kernels.cases import CASES

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.full,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, which runs the kernels itself"),
    pytest.mark.skipif(triton_ptx.missing() is not None, reason=str(triton_ptx.missing())),
]
# Names of cases.
EMULATED = [name for name, case in CASES.items() if case.emulated]
ADAM, LAMB, BITS = "adam_step_: few, bfloat16", "lamb_step_: few, float32", "few_bit_encode: odd"
NORM = "grad_norm_: few, scale 1024.0"


class Fault(NamedTuple):
    """A change of a kernel's PTX, None to leave the kernel out; the case that must raise; the error and words of it."""

    kernel: str
    change: Callable[[str], str] | None
    case: str
    kind: type[PtxError]
    words: str | None


def few(action: str) -> str:
    return FEW.replace("ACTION", action) + r"\g<0>"


FAULTS = {
    "race: no barrier before the sums of warps are read": Fault(
        "norm_tiles", edit(BARRIER, "", 0), NORM, RaceError, None
    ),
    "race: no barrier before the total is added up": Fault("norm_total", edit(BARRIER, "", 0), NORM, RaceError, None),
    "race: no barriers around what warps exchange": Fault("adam_tiles", edit(BARRIER, "", None), ADAM, RaceError, None),
    "init: no prologue": Fault("adam_prologue", None, ADAM, InitError, "nobody wrote"),
    "init: no partial sums": Fault("norm_tiles", None, NORM, InitError, "nobody wrote"),
    "init: no sums of layers": Fault("lamb_norm_tiles", None, LAMB, InitError, "nobody wrote"),
    "sync: a barrier for seven threads": Fault(
        "norm_tiles", edit(BARRIER, few("bar.sync 0")), NORM, PtxError, "barrier"
    ),
    "sync: seven threads return before a barrier": Fault(
        "norm_total", edit(BARRIER, few("ret")), NORM, PtxError, "barrier"
    ),
    "sync: seven threads return before a shuffle": Fault(
        "adam_tiles", edit(SHUFFLE, few("ret")), ADAM, PtxError, "lanes of a warp"
    ),
    "memory: a gradient's load one vector on": Fault(
        "norm_tiles", edit(WIDE_LOAD, r"\1 + 32\2", None), NORM, PtxError, "outside of all buffers"
    ),
    "memory: stores of codes one vector on": Fault(
        "encode_vectors", edit(STORE, r"\1 + 64\2", None), BITS, PtxError, "outside of all buffers"
    ),
    "memory: the norm in the next word": Fault(
        "norm_total", edit(STORE, r"\1 + 8\2"), NORM, PtxError, "outside of all buffers"
    ),
}


def run(name: str, watch: Watch) -> None:
    from memkern.triton import tensor_table

    # Called without torch's dispatcher, under which the mode that watches copies would not see them.
    ops = SimpleNamespace(**{op: _ops._kernel("memkern_triton", op) for op in SCHEMAS})

    tensor_table._plans.clear()  # else a table that an earlier case wrote would be reused
    with triton_ptx.emulated(watch):
        compare(Kernels("triton", WatchedOps(ops, watch)), CASES[name])
    assert watch.ran


def check_fault(name: str) -> None:
    fault = FAULTS[name]
    watch = Watch("together", fault.kernel, fault.change, spoil=False)
    with pytest.raises(fault.kind, match=fault.words):
        run(fault.case, watch)
    assert watch.changed


@pytest.mark.parametrize("name", [ADAM, NORM])
def test_a_sample_is_without_faults(name: str) -> None:
    run(name, Watch("last"))


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.kernel == "norm_total"])
def test_some_planted_faults_are_found(name: str) -> None:
    check_fault(name)


@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", EMULATED)
def test_all_cases_are_without_faults(name: str, order: str) -> None:
    run(name, Watch(order))


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str) -> None:
    check_fault(name)


def test_three_faults_of_each_kind() -> None:
    kinds = [name.partition(":")[0] for name in FAULTS]
    assert {kind: kinds.count(kind) for kind in kinds} == {"race": 3, "init": 3, "sync": 3, "memory": 3}
