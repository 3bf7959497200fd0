"""Symbolic sizes: what a graph saves does not depend on the sizes of the call that it was made for.

Means of few rows and budgets in bytes are exceptions: where sizes leave the range for which a graph is right, another
graph is made.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters

from tests.support.partitioned import backend, step

from .blocks import Block, ByHand

WIDTH = 64


class Frozen(Block):
    """A frozen ``down`` does not save its input, the GELU's output, so that few bits for the GELU's derivative do."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.down.requires_grad_(False)


# name: block, options of the partitioner, ops of memkern in the forward graph
CASES: dict[str, tuple[type[Block], dict[str, Any], tuple[str, ...]]] = {
    "8 bits": (Block, {"bits": 8}, ("quantize_blockwise",)),
    "exact": (Block, {"bits": "exact"}, ()),
    "half": (Block, {"bits": 8, "memory_budget": 0.5}, ("quantize_blockwise",)),
    "by hand, 8 bits": (ByHand, {"bits": 8}, ("quantize_blockwise", "few_bit_encode")),
    "by hand, attention's products computed again": (ByHand, {"bits": "exact", "memory_budget": 0.1}, ()),
    "few bits": (Frozen, {"bits": 8, "activations": 3}, ("quantize_blockwise", "few_bit_encode")),
}
SECOND_CALL = (8, 300)  # batch, tokens


def graphs(model: nn.Module, first: tuple[int, int], **options: Any) -> list[str]:
    """The code of the graphs, forward and backward, that the second of two calls runs; first: the first one's sizes."""
    torch._dynamo.reset()
    codes: list[str] = []

    def look(fw: fx.GraphModule, bw: fx.GraphModule, returned: int) -> None:
        codes[:] = fw.code, bw.code

    compiled = torch.compile(model, backend=backend(look=look, **options), dynamic=True)
    for sizes in (first, SECOND_CALL):
        compiled(torch.randn(*sizes, WIDTH, requires_grad=True)).square().mean().backward()
    return codes


# make test runs the first, make test-all the block with few bits, too.
TIERS = dict.fromkeys(CASES, pytest.mark.long) | {"8 bits": (), "few bits": pytest.mark.full}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in TIERS.items()])
@pytest.mark.filterwarnings("ignore:a compiled graph saves")
def test_the_first_sizes_do_not_decide_what_is_saved(name: str) -> None:
    make, options, expected = CASES[name]
    model = make()
    small, large = (graphs(model, sizes, **options) for sizes in ((2, 3), SECOND_CALL))
    assert small == large
    assert {op for op in ("quantize_blockwise", "few_bit_encode") if f"memkern.{op}" in large[0]} == {*expected}


@pytest.mark.usefixtures("fresh_compiler")
def test_a_mean_of_few_rows_has_a_graph_of_its_own() -> None:
    """Coarse codes are good enough where each row is a small part of a mean of many, and not where rows are few."""
    torch._dynamo.reset()
    w = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def normalized(w: Tensor, x: Tensor) -> Tensor:
        h = x @ w
        return (h * torch.rsqrt(h.pow(2).mean(0, keepdim=True) + 1e-6) @ w).square().mean()

    compiled = torch.compile(normalized, backend=backend(8), dynamic=True)
    for rows, graph_count in ((100, 1), (64, 1), (4, 2), (8, 2)):  # of all calls so far
        compiled(w, torch.randn(rows, WIDTH)).backward()
        assert counters["stats"]["unique_graphs"] == graph_count


@pytest.mark.full
@pytest.mark.usefixtures("fresh_compiler")
def test_a_budget_in_bytes_is_kept_as_sizes_change() -> None:
    torch._dynamo.reset()
    model, budget = Block(), 600_000
    compiled = torch.compile(model, backend=backend(8, memory_budget=budget), dynamic=True)
    for tokens, graph_count in ((60, 1), (64, 1), (33, 1), (100, 2), (120, 2), (40, 2)):
        assert step(model, torch.randn(2, tokens, WIDTH), compiled)[0] <= budget
        assert counters["stats"]["unique_graphs"] == graph_count


STEP = """
import hashlib, sys, torch, memkern
from torch._dynamo.utils import counters
torch.set_num_threads(1)
torch.manual_seed(0)
class Softplus(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.softplus(x, BETA)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), Softplus(), torch.nn.Linear(64, 64))
call = memkern.compile(model, saved_bits=8, dynamic=True)
x = torch.randn(2048, 64)
for rows in map(int, sys.argv[1:]):
    model.zero_grad()
    saved = memkern.memory.saved_bytes(lambda: call(x[:rows]).sum(), x)
    call(x[:rows]).square().mean().backward()
    digest = hashlib.sha256(model[0].weight.grad.numpy().tobytes()).hexdigest()
    print(digest, saved, *(counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("hit", "miss")))
"""


@pytest.mark.full
def test_another_process_takes_the_graph_of_its_sizes() -> None:
    """torch's cache on disk: the graph of a small first call is taken for small sizes, and not for a large one."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    program = STEP.replace("BETA", f"{1 + secrets.SystemRandom().random()}")  # no graph in the cache has it

    def printed(*rows: str) -> list[list[str]]:
        command = [sys.executable, "-c", program, *rows]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return [line.split() for line in run.stdout.splitlines()]

    [[small, _, *first_counts]] = printed("3")
    [[_, saved, *large_counts], [small_again, _, *small_counts]] = printed("2048", "3")
    assert (first_counts, large_counts, small_counts) == (["0", "1"], ["0", "1"], ["1", "1"])  # hits and misses
    assert small_again == small
    assert int(saved) < 1.2 * 2048 * 64 * 2  # two activations in one byte an element, and scales
