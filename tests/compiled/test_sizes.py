"""Symbolic sizes: what a graph saves does not depend on the sizes of the call that it was made for.

Means of few rows and budgets in bytes are exceptions: where sizes leave the range for which a graph is right, another
graph is made.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import memkern
from tests.support.partitioned import backend, step

from .blocks import Block, ByHand

WIDTH = 64


class Frozen(Block):
    """A Block whose layer ``down`` is frozen and saves no input, so that only codes of GELU's derivative are saved."""

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
CACHE = ("autograd_cache_hit", "autograd_cache_miss")  # counters of torch


def graphs(model: nn.Module, first: tuple[int, int], **options: Any) -> list[str]:
    """The code of the forward and the backward graph of a second call, after a call with the sizes ``first``."""
    torch._dynamo.reset()
    codes: list[str] = []

    def look(fw: fx.GraphModule, bw: fx.GraphModule, returned: int) -> None:
        codes[:] = fw.code, bw.code

    compiled = torch.compile(model, backend=backend(look=look, **options), dynamic=True)
    for sizes in (first, SECOND_CALL):
        compiled(torch.randn(*sizes, WIDTH, requires_grad=True)).square().mean().backward()
    return codes


# make test runs "8 bits"; make test-all also runs "few bits".
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
    for rows, graph_count in ((100, 1), (64, 1), (4, 2), (8, 2)):  # graph_count: the graphs of all calls so far
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


@pytest.mark.full
@pytest.mark.usefixtures("fresh_compiler")
def test_the_cache_on_disk_gives_the_graph_of_the_sizes() -> None:
    """The graph of a small first call, which saves exact values, is not taken for a size that needs codes."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 64)), torch.randn(2048, 64)
    budget = 300_000  # codes of two activations take 266,000 bytes

    def new_process(rows: int) -> tuple[list[int], int, Tensor]:
        """A step as in a new process: hits and misses of the cache, saved bytes, gradients."""
        torch._dynamo.reset()
        counters.clear()
        call = memkern.compile(model, saved_bits=8, memory_budget=budget, dynamic=True)
        saved, gradients = step(model, x[:rows].clone(), call)
        return [counters["aot_autograd"][name] for name in CACHE], saved, gradients

    with fresh_cache():
        (first, saved_at_first, gradients), (second, saved, gradients_again) = (new_process(3) for _ in range(2))
        third, saved_of_many, _ = new_process(2048)
    assert (first, second, third) == ([0, 1], [1, 0], [0, 1])
    assert saved == saved_at_first
    assert torch.equal(gradients, gradients_again)
    assert saved_of_many <= budget
