"""Triton's kernels as its compiler leaves them, with every access watched: races, bytes nobody wrote, barriers, bounds.

As lab/tests/test_cuda_checks.py for CUDA's. Results are compared too: a read that races gets other bits.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from lab.emulators import triton_ptx
from lab.emulators.ptx_checks import ORDERS, InitError, RaceError
from lab.emulators.ptx_emulator import PtxError
from lab.emulators.triton_checks import BARRIER, FEW, SHUFFLE, STORE, WIDE_LOAD, Watch, WatchedOps, nth
from memkern import reference
from memkern.quant.codec import CODECS as NUMBERS
from memkern.schemas import StepArgs
from tests.support import muon_helpers
from tests.support.activation_kernels import compare_gradients
from tests.support.helpers import FLOATS, assert_same, tensor
from tests.support.muon_helpers import compare_muon
from tests.support.simt import drive

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.full,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, which runs the kernels itself"),
    pytest.mark.skipif(triton_ptx.missing() is not None, reason=str(triton_ptx.missing())),
]
FP32, BF16, FP16 = FLOATS
SOME_LAYOUTS = ("odd", "long rows", "short rows", "unaligned", "whole blocks")


def step(name: str, param: torch.dtype, grad: torch.dtype, **options: Any) -> Callable[[Any], None]:
    def case(ops: Any) -> None:
        args = drive.step_args(name, param, grad, **{"layouts": SOME_LAYOUTS, **options})
        args = args._replace(**drive.scaler())
        expected = drive.cloned(args)
        getattr(ops, name)(args)
        getattr(reference, name)(expected)
        assert_same([*args], [*expected])

    return case


def codecs(ops: Any) -> None:
    for i, layout in enumerate(SOME_LAYOUTS):
        for codec, signed, number in (("power", True, None), ("dynamic", False, 3), ("power", False, 3)):
            x = tensor(layout, FLOATS[i % 3])
            args = (x if signed else x.abs()), NUMBERS[codec], signed, 128, number
            expected = reference.quantize_blockwise(*args)
            assert_same([*ops.quantize_blockwise(*args)], [*expected], layout)
            back = *expected, NUMBERS[codec], 128, FLOATS[i % 3]
            assert_same(ops.dequantize_blockwise(*back), reference.dequantize_blockwise(*back), layout)


def grad_norm(ops: Any) -> None:
    grads = [tensor(layout, FLOATS[i % 3], scale=0.1) for i, layout in enumerate(SOME_LAYOUTS)]
    norm = torch.zeros((), dtype=torch.float64)
    ops.grad_norm_(norm, grads, torch.tensor(4.0))
    truth = torch.cat([g.double().flatten() for g in grads]).norm() / 4
    torch.testing.assert_close(norm, truth, rtol=1e-12, atol=0)


def activations(ops: Any) -> None:
    for i, layout in enumerate(("odd", "unaligned", "a group")):
        compare_gradients(ops, layout, FLOATS[i], i + 1)


def muon(ops: Any) -> None:
    given = SimpleNamespace(
        muon_momentum_=lambda *a: ops.muon_momentum_(*a[:2], StepArgs(*a[2:])),
        muon_apply_=lambda *a: ops.muon_apply_(*a[:2], StepArgs(*a[2:])),
    )
    compare_muon(given, muon_helpers.step_args("power", BF16, BF16, 2, 128), steps=1)
    compare_muon(given, muon_helpers.step_args(None, FP32, FP32, 0, 128), steps=1)


CASES: dict[str, Callable[[Any], None]] = {
    "adam bf16": step("adam_step_", BF16, BF16),
    "adam fp32": step("adam_step_", FP32, FP32),
    "adam bf16+8 and stochastic": step("adam_step_", BF16, BF16, weights=(2, 1)),
    "adam bf16+16": step("adam_step_", BF16, FP32, weights=(3, 0)),
    "adam blocks of 1024": step("adam_step_", FP16, FP32, block_size=1024),
    "lamb fp32": step("lamb_step_", FP32, FP32),
    "lamb bf16": step("lamb_step_", BF16, BF16),
    "lars fp32": step("lars_step_", FP32, FP32),
    "lars bf16": step("lars_step_", BF16, BF16),
    "lion fp32": step("lion_step_", FP32, FP32),
    "lion bf16": step("lion_step_", BF16, BF16),
    "sgd bf16": step("sgd_step_", BF16, BF16),
    "codecs": codecs,
    "grad norm": grad_norm,
    "activations": activations,
    "muon": muon,
}


class Fault(NamedTuple):
    """``change`` of a kernel's PTX, or None where it is left out; the case in which it must be found; as what."""

    kernel: str
    change: Callable[[str], str] | None
    case: str
    kind: type[PtxError]
    words: str | None


def few(action: str) -> str:
    return FEW.replace("ACTION", action) + r"\g<0>"


FAULTS = {
    "race: no barrier before the sums of warps are read": Fault(
        "norm_tiles", nth(BARRIER, "", 0), "grad norm", RaceError, None
    ),
    "race: no barrier before the total is added up": Fault(
        "norm_total", nth(BARRIER, "", 0), "grad norm", RaceError, None
    ),
    "race: no barriers around what warps exchange": Fault(
        "adam_tiles", nth(BARRIER, "", None), "adam bf16", RaceError, None
    ),
    "init: no prologue": Fault("adam_prologue", None, "adam bf16", InitError, "nobody wrote"),
    "init: no partial sums": Fault("norm_tiles", None, "grad norm", InitError, "nobody wrote"),
    "init: no sums of layers": Fault("lamb_norm_tiles", None, "lamb fp32", InitError, "nobody wrote"),
    "sync: a barrier for seven threads": Fault(
        "norm_tiles", nth(BARRIER, few("bar.sync 0")), "grad norm", PtxError, "barrier"
    ),
    "sync: seven threads return before a barrier": Fault(
        "norm_total", nth(BARRIER, few("ret")), "grad norm", PtxError, "barrier"
    ),
    "sync: seven threads return before a shuffle": Fault(
        "adam_tiles", nth(SHUFFLE, few("ret")), "adam bf16", PtxError, "lanes of a warp"
    ),
    "memory: a gradient's load one vector on": Fault(
        "norm_tiles", nth(WIDE_LOAD, r"\1 + 32\2", None), "grad norm", PtxError, "outside of all buffers"
    ),
    "memory: stores of codes one vector on": Fault(
        "encode_vectors", nth(STORE, r"\1 + 64\2", None), "activations", PtxError, "outside of all buffers"
    ),
    "memory: the norm in the next word": Fault(
        "norm_total", nth(STORE, r"\1 + 8\2"), "grad norm", PtxError, "outside of all buffers"
    ),
}


def run(name: str, watch: Watch) -> None:
    import memkern.triton
    from memkern.triton import tensor_table

    tensor_table._plans.clear()  # a plan's table would be one that an earlier launch has written
    with triton_ptx.emulated(watch):
        CASES[name](WatchedOps(memkern.triton, watch))
    assert watch.ran


def check_fault(name: str) -> None:
    fault = FAULTS[name]
    watch = Watch("together", fault.kernel, fault.change, spoil=False)
    with pytest.raises(fault.kind, match=fault.words):
        run(fault.case, watch)
    assert watch.changed


@pytest.mark.parametrize("name", ["adam bf16", "grad norm"])
def test_a_sample(name: str) -> None:
    run(name, Watch("last"))


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.kernel == "norm_total"])
def test_some_planted_faults_are_found(name: str) -> None:
    check_fault(name)


@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CASES)
def test_all_cases(name: str, order: str) -> None:
    run(name, Watch(order))


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str) -> None:
    check_fault(name)


def test_three_faults_of_each_kind() -> None:
    kinds = [name.partition(":")[0] for name in FAULTS]
    assert {kind: kinds.count(kind) for kind in kinds} == {"race": 3, "init": 3, "sync": 3, "memory": 3}
