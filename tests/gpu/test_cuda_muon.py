"""Muon's CUDA kernels as CPU programs: the reference's bits, sums, skipped steps, launches, refusals."""

from __future__ import annotations

from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest
import torch

from memkern import reference
from memkern.quant.codec import WEIGHTS
from tests.support.helpers import FLOATS, assert_same, name_of
from tests.support.muon_helpers import compare_muon, copied, step_args
from tests.support.simt import build

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(build.missing() is not None, reason=str(build.missing())),
]
ops = torch.ops.memkern_simt
ORDERS = ("fwd", "rev", "rand")


@pytest.fixture(autouse=True)
def library(simt_library: tuple[CDLL, Path]) -> CDLL:
    return simt_library[0]


def sums_for(updates: Any) -> list[torch.Tensor]:
    return [torch.full(u.shape[:-2], torch.nan, dtype=torch.float64) for u in updates]


@pytest.mark.parametrize("codec", [None, "power", "dynamic"])
@pytest.mark.parametrize("grad", FLOATS, ids=name_of)
@pytest.mark.parametrize("block_size", [24, 128, 1024])
def test_momentum(codec: str | None, grad: torch.dtype, block_size: int) -> None:
    compare_muon(ops, step_args(codec, torch.float32, grad, block_size=block_size))


@pytest.mark.parametrize("storage", WEIGHTS.values(), ids=[*WEIGHTS])
@pytest.mark.parametrize("codec", [None, "power"])
def test_weights(codec: str | None, storage: int) -> None:
    compare_muon(ops, step_args(codec, torch.bfloat16, torch.bfloat16, storage, 128))


@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": 0.0},
        {"maximize": 1.0, "momentum": 0.3},
        {"grad_norm": torch.tensor(3.0, dtype=torch.float64)},
        {"grad_scale": torch.tensor(8.0), "momentum": 0.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options(options: dict[str, Any]) -> None:
    compare_muon(ops, step_args("power", torch.float16, torch.float32, **options))


@pytest.mark.parametrize("order", ORDERS)
def test_threads_in_any_order(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMT_ORDER", order)
    for codec in (None, "power", "dynamic"):
        compare_muon(ops, step_args(codec, torch.bfloat16, torch.float32, WEIGHTS["bf16+8"], 128))


def test_a_step_is_skipped_whole() -> None:
    args = step_args("power", torch.float32, torch.float32)._replace(found_inf=torch.ones(1))
    before = copied(args)
    updates = [torch.zeros_like(p, dtype=torch.bfloat16) for p in args.params]
    sums = sums_for(updates)
    ops.muon_momentum_(updates, sums, *args)
    ops.muon_apply_(updates, [1.0] * len(updates), *args)
    assert not any(total.any() for total in sums)
    assert_same([*args], [*before])


def test_a_graph_has_few_launches_and_replays(library: CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    args = step_args("power", torch.float32, torch.float32)
    expected = copied(args)
    updates = [torch.empty_like(p, dtype=torch.bfloat16) for p in args.params]
    ratios = [0.2 + i for i in range(len(updates))]
    sums = sums_for(updates)

    def by_reference() -> list[torch.Tensor]:
        found = [torch.empty_like(u) for u in updates]
        reference.muon_momentum_(expected, found)
        reference.muon_apply_(expected, found, ratios)
        return found

    def by_kernels() -> None:
        ops.muon_momentum_(updates, sums, *args)
        ops.muon_apply_(updates, ratios, *args)

    by_kernels()  # tables are known when the graph is captured
    assert_same(updates, by_reference())
    library.memkern_simt_forget()
    monkeypatch.setenv("SIMT_CAPTURE", "1")
    by_kernels()
    monkeypatch.delenv("SIMT_CAPTURE")
    # Momentum: a table, two kernels, another table, two more. Parameters: a table, two kernels.
    assert library.memkern_simt_launches() == 9
    for g in args.grads:
        g.mul_(-0.3)
    for g, x in zip(expected.grads, args.grads, strict=True):
        g.copy_(x)
    args.lr[0].mul_(0.5), expected.lr[0].mul_(0.5)
    library.memkern_simt_replay()
    assert_same(updates, by_reference())
    assert_same([*args], [*expected])
    library.memkern_simt_forget()


def test_bad_input_changes_nothing() -> None:
    args = step_args("power", torch.float32, torch.float32)
    before = copied(args)
    updates = [torch.zeros_like(p, dtype=torch.bfloat16) for p in args.params]
    sums = sums_for(updates)
    for bad, message in (
        (lambda: ops.muon_momentum_(updates[1:], sums[1:], *args), "updates must have"),
        (
            lambda: ops.muon_momentum_([u.float() for u in updates], sums, *args),
            r"updates\[0\] must be bfloat16",
        ),
        (
            lambda: ops.muon_momentum_(updates, [s.float() for s in sums], *args),
            r"sums\[0\] must be contiguous",
        ),
        (lambda: ops.muon_apply_(updates, [1.0], *args), "ratios must have"),
        (
            lambda: ops.muon_apply_(updates, [1.0] * len(updates), *args._replace(steps=args.steps[1:])),
            "steps must have",
        ),
    ):
        with pytest.raises(RuntimeError, match=message):
            bad()
    assert_same([*args], [*before])
