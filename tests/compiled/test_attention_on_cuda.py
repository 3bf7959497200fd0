"""In graphs with 8-bit codes CUDA's attention kernels save their inputs as codes and run again (on_cuda.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memkern.planner import fake_cuda

from .on_cuda import HEADS, KERNELS, TOKENS, WIDTH, all_graphs

# name: kernel, saved bits and dropout of on_cuda.graphs
CASES: dict[str, tuple[Any, ...]] = {
    **{f"{kernel}, {bits}": (kernel, bits) for kernel in KERNELS for bits in (None, "exact", 8)},
    "flash, dropout": ("flash", 8, 0.1),
}
ROWS = 2 * TOKENS

pytestmark = [
    pytest.mark.full,  # 12 seconds in a process of its own
    pytest.mark.skipif(
        fake_cuda.why_not() is not None and not torch.cuda.is_available(),
        reason="no GPU, which a torch built for one asks for; fake CUDA is for others, with a C++ compiler",
    ),
]


@pytest.fixture(scope="module")
def graphs() -> dict[str, dict[str, Any]]:
    counted: dict[str, dict[str, Any]] = fake_cuda.call(all_graphs, cases=CASES)
    return counted


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_is_coded_and_runs_again(graphs: dict[str, dict[str, Any]], kernel: str) -> None:
    plain, exact, coded = (graphs[f"{kernel}, {bits}"] for bits in (None, "exact", 8))
    assert [g["recomputed"] for g in (plain, exact, coded)] == [0, 0, 1]
    assert coded["ops"] == []  # codes are for Inductor to compile
    assert sum(exact["saved"].values()) < sum(plain["saved"].values())
    # queries, keys, values, inputs of two norms and of gelu
    assert coded["saved"]["int8"] == ROWS * WIDTH * (3 + 2 + 4)
    assert coded["saved"]["float32"] < 0.1 * ROWS * WIDTH * 4
    assert sum(coded["saved"].values()) < 0.2 * sum(plain["saved"].values())


def test_attention_with_dropout_stays_exact(graphs: dict[str, dict[str, Any]]) -> None:
    with_dropout = graphs["flash, dropout"]
    assert with_dropout["recomputed"] == 0
    assert with_dropout["saved"]["int8"] == ROWS * WIDTH * (2 + 4)
    assert with_dropout["saved"]["float32"] >= ROWS * (4 * WIDTH + HEADS) * 4  # and the log-sum-exp
