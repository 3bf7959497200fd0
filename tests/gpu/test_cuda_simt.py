"""The CUDA kernels compiled by g++ (tests/support/simt): GELU, sums where fp64 is slow, host scalars, launches, graphs.

That they give the reference's bits is tested in tests/kernels. Arithmetic, indexing, tables and launches are those of
a GPU here; timing, and what its memory does with two threads at once, are not.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from ctypes import CDLL
from pathlib import Path

import pytest
import torch
from torch import Tensor

from memkern import reference
from memkern.fewbit.tables import LEVELS
from memkern.quant.codec import ODD
from memkern.schemas import STEP_OPS, StepArgs
from tests.support import cache
from tests.support.activation_kernels import compare_bf16_table, compare_gelus
from tests.support.helpers import LAYOUTS, assert_same, hard, like, over_dtypes
from tests.support.kernels.arguments import (
    F32,
    LAYERWISE,
    MATRICES,
    MUON,
    OPS,
    SCALER,
    arguments,
    cloned,
    gradients,
    step_args,
    with_gradients,
)
from tests.support.kernels.backends import REFERENCE, assert_same_but_sums
from tests.support.kernels.cases import CASES
from tests.support.simt import build

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(build.missing() is not None, reason=str(build.missing())),
]

over_orders = pytest.mark.parametrize("order", ["fwd", "rev", "rand"])
over_steps = pytest.mark.parametrize("name", STEP_OPS)
# The table, the scalars, the update by each codec; with trust ratios the norms by each codec and the ratios as well.
MAX_LAUNCHES = {name: 7 if op.has_trust_ratios else 4 for name, op in OPS.items()}
MAX_LAUNCHES["muon_momentum_"] = 7  # a table, three kernels, a second table for the sums, two kernels


@pytest.fixture(scope="module")
def library(simt_library: tuple[CDLL, Path]) -> CDLL:
    return simt_library[0]


@pytest.fixture
def graph(library: CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[CDLL]:
    """Launches are recorded while SIMT_CAPTURE is set."""
    library.memkern_simt_forget()
    yield library
    library.memkern_simt_forget()


@pytest.fixture(autouse=True)
def _loaded(library: CDLL) -> None:
    """Every test calls the ops of the library."""


# ---- the kernels


@pytest.mark.parametrize("words", ["few whole", "few,"])
def test_general_kernels_in_place_of_fast_paths(words: str, simt_library: tuple[CDLL, Path]) -> None:
    """MEMKERN_CUDA_FAST=0, which is read once: in a process of its own, with the reference's bits there too."""
    assert_cases_pass(simt_library[1], words, MEMKERN_CUDA_FAST="0")


def assert_cases_pass(library: Path, words: str = "", order: str = "fwd", **environment: str) -> None:
    """Runs the cases of tests/kernels whose names contain ``words`` in another process. order: of threads."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.kernels", f"simt-{order}", str(library), words],
        env={**os.environ, "PYTHONPATH": str(build.ROOT), **environment}, cwd=build.ROOT,
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, (run.stdout + run.stderr)[-6000:]
    assert run.stdout.strip() == "nothing found"


@over_orders
def test_a_norm_has_the_same_bits_in_any_order(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = []
    for threads in ("fwd", order):
        monkeypatch.setenv("SIMT_ORDER", threads)
        ((norm, grads, scale),) = CASES["grad_norm_: several tiles, scale 1024.0"].calls()
        torch.ops.memkern_simt.grad_norm_(norm, grads, scale)
        norms.append(norm)
    assert_same(norms[1], norms[0])


@over_dtypes
def test_forward_of_gelu(dtype: torch.dtype) -> None:
    odd = [key for key, table in LEVELS.items() if table.symmetry == ODD]
    assert {("gelu", bits) for bits in (1, 2, 3, 4)} <= {*odd}
    compare_gelus(torch.ops.memkern_simt, dtype, odd)


def test_forward_of_every_bf16() -> None:
    compare_bf16_table(torch.ops.memkern_simt)


# ---- sums


def rounded_alike(direction: int) -> Tensor:
    """Numbers from 1 to 1.0625 whose squares fp32 rounds by over a quarter of an ulp, all up (1) or all down (-1)."""
    x = torch.linspace(1, 1.0625, 2**20)
    error = (x * x).double() - x.double().square()
    return x[error * direction > 2.0**-25]


RANGES = {
    "normal": hard((5003,), 0),
    "equal": torch.full((5003,), 1.0003),
    "all rounded up": rounded_alike(1),
    "all rounded down": rounded_alike(-1),
    "squares underflow": 1e-30 * torch.randn(5003),
    "subnormal": 1e-42 * torch.randn(5003),
    "squares overflow": 1e30 * torch.randn(5003),
    "from 1e-30 to 1e30": torch.logspace(-30, 30, 5003),
    "small ones beside 1": torch.cat([torch.ones(1), torch.full((4999,), 2.0**-64)]),
    "few are not zero": torch.zeros(5003).index_fill(0, torch.arange(0, 5003, 500), 3e-30),
}


@pytest.mark.parametrize("case", RANGES)
def test_norm_where_fp64_is_slow(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """csrc/cuda/squares.cuh rounds a sum's terms three times, by 3 * 2^-24 at most, and so a norm by half of that."""
    monkeypatch.setenv("SIMT_SLOW_FP64", "1")
    x = RANGES[case]
    norm = torch.zeros((), dtype=torch.float64)
    torch.ops.memkern_simt.grad_norm_(norm, [x], None)
    error = float(norm / x.double().norm()) - 1
    assert abs(error) < 1e-7
    if "rounded" in case:  # an error this large shows that the sum was in fp32
        assert abs(error) > 1e-8


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_inf_reach_the_norm_where_fp64_is_slow(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMT_SLOW_FP64", "1")
    norm = torch.zeros((), dtype=torch.float64)
    torch.ops.memkern_simt.grad_norm_(norm, [torch.ones(100).index_fill(0, torch.tensor(50), value)], None)
    torch.testing.assert_close(norm, torch.tensor(value).double(), equal_nan=True)


@pytest.mark.parametrize("scale", [1.0, 1e-29, 1e29])
@pytest.mark.parametrize("name", LAYERWISE)
def test_squares_where_fp64_is_slow(name: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMT_SLOW_FP64", "1")
    args = step_args(name, always_adapt=[1, 1], eps=[1e-8, 1e-6])
    params = [p * scale for p in args.params]
    grads = [like(p, i, scale=scale) for i, p in enumerate(params)]
    squares, truth = torch.zeros(2, len(params), 2, dtype=torch.float64)
    args = args._replace(params=params, grads=grads, squares=squares, squares_only=True)
    getattr(torch.ops.memkern_simt, name)(*args)
    getattr(reference, name)(args._replace(squares=truth))
    torch.testing.assert_close(squares, truth, rtol=2e-7, atol=0)  # twice the norms' 1e-7
    assert not torch.equal(squares, truth)


# ---- the table


@over_steps
def test_numbers_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """lr and a GradScaler's tensors may be on the CPU: their values are then part of the table."""
    monkeypatch.setenv("SIMT_HOST_SCALARS", "1")
    args = step_args(name, layouts=("odd", "one element", "whole blocks"), **SCALER)
    expected = cloned(args)
    for step in range(3):
        args.lr[0].mul_(0.5)
        getattr(torch.ops.memkern_simt, name)(*args)
        expected.lr[0].copy_(args.lr[0])
        getattr(reference, name)(expected)
        assert_same([*args], [*expected], f"step {step}")


@over_steps
def test_optimizers_take_turns(name: str) -> None:
    """Two with the same first parameter and number of tensors share a cached table; each step writes its own there."""
    first, second = step_args(name), step_args(name, codec=(1, 0))
    second = second._replace(params=[first.params[0], *second.params[1:]])
    expected = [cloned(first), cloned(second)]
    expected[1] = expected[1]._replace(params=[expected[0].params[0], *expected[1].params[1:]])
    for _ in range(2):
        for args, expected_args in zip((first, second), expected, strict=True):
            getattr(torch.ops.memkern_simt, name)(*args)
            getattr(reference, name)(expected_args)
    assert_same([[*first], [*second]], [[*args] for args in expected])


@pytest.mark.parametrize("n", [1, 148, 1000])
def test_launches_are_few_whatever_the_number_of_tensors(n: int, graph: CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    args = step_args("lion_step_", ((40,),) * n, kinds="fp32")
    expected = cloned(args)
    torch.ops.memkern_simt.lion_step_(*args)  # the table is new: as many launches as it has chunks
    # zero_grad(set_to_none=True): new gradients at every step.
    args = args._replace(grads=[g.clone() for g in args.grads])
    monkeypatch.setenv("SIMT_CAPTURE", "1")
    torch.ops.memkern_simt.lion_step_(*args)
    monkeypatch.delenv("SIMT_CAPTURE")
    chunks = -(-n * 120 // 31744) - 1  # a graph writes all of its table, 120 bytes a tensor, kLargeChunk a launch
    assert graph.memkern_simt_launches() <= MAX_LAUNCHES["lion_step_"] + chunks
    graph.memkern_simt_replay()
    for _ in range(2):
        reference.lion_step_(expected)
    assert_same([*args], [*expected])


@pytest.mark.parametrize("name", OPS)
def test_a_graph_replays_while_lr_changes(name: str, graph: CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = MATRICES[:6] if name in MUON else [*LAYOUTS]
    args = arguments(name, layouts=layouts, **SCALER | {"found_inf": torch.tensor(0.0)})
    step = StepArgs(*args[-len(StepArgs._fields) :])
    op, expected = getattr(torch.ops.memkern_simt, name), copy.deepcopy(args)

    def compare(what: str, grads: Sequence[Tensor]) -> None:
        expected_args = with_gradients(expected, grads)
        expected_step = StepArgs(*expected_args[-len(step) :])
        for expected_lr, lr in zip(expected_step.lr, step.lr, strict=True):
            expected_lr.copy_(lr)
        expected_step.found_inf.copy_(step.found_inf)
        REFERENCE.call(name, *expected_args)
        assert_same_but_sums(with_gradients(args, grads), expected_args, what, 1e-12)

    op(*args)  # the table is known when the graph is captured
    compare("before", step.grads)
    monkeypatch.setenv("SIMT_CAPTURE", "1")
    op(*args)
    monkeypatch.delenv("SIMT_CAPTURE")
    assert_same_but_sums(args, expected, "nothing runs while a graph is captured", 1e-12)
    assert graph.memkern_simt_launches() <= MAX_LAUNCHES[name]
    for i in range(3):
        for lr in step.lr:
            lr.mul_(0.7)
        step.found_inf.fill_(i == 1)
        for g, new_g in zip(step.grads, gradients(step.params, i + 5, [F32]), strict=True):
            g.copy_(new_g)
        graph.memkern_simt_replay()
        compare(f"replay {i}", step.grads)
        other_grads = gradients(step.params, i + 50, [F32])  # other tensors: another table
        op(*with_gradients(args, other_grads))
        compare(f"eager step {i}", other_grads)


# ---- memory


@pytest.mark.long
def test_sanitizers_find_nothing() -> None:
    def library_path(name: str) -> str:
        return subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()

    runtime = [library_path(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    if not all(os.path.isabs(name) for name in runtime):
        pytest.skip("g++ has no libasan or libubsan beside it")
    flags = ("-Og", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-sanitize=alignment")
    folder = cache.built("simt-sanitized", lambda folder: build.compile_library(folder, *flags), flags)
    assert_cases_pass(
        folder / build.LIBRARY, order="rand",
        LD_PRELOAD=" ".join(runtime), ASAN_OPTIONS="detect_leaks=0:detect_stack_use_after_return=0",
    )  # fmt: skip
