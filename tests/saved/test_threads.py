"""Graphs with nodes of several threads, which count their nodes each for itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import memkern

from .helpers import WIDTH

Program = Callable[[int, list[Tensor]], tuple[Callable[[], Any], Callable[[Any], Tensor]]]
"""(nodes that the other thread builds first, weights) to what it makes, and the loss of that in this thread."""


def _in_a_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def _nodes(x: Tensor, count: int) -> Tensor:
    for _ in range(count):
        x = x * 1.0
    return x


def tower_beside_tanh(count: int, w: list[Tensor]) -> Any:
    x = torch.ones(WIDTH, WIDTH).cumsum(1) / WIDTH
    return (
        lambda: _nodes(x @ w[0], count),
        lambda b: ((torch.tanh(x @ w[1]) + b @ w[2]) @ w[2]).sum(),
    )


def tower_into_product(count: int, w: list[Tensor]) -> Any:
    x = torch.ones(WIDTH, WIDTH).cumsum(1) / WIDTH

    def loss(b: Tensor) -> Tensor:
        y = b @ w[1]
        return (torch.tanh(y) @ w[2] + F.silu(y) @ w[2]).square().sum()

    return lambda: _nodes(x @ w[0], count), loss


def logarithm_of_saturated_gates(count: int, w: list[Tensor]) -> Any:
    """The other thread divides by a result of this one, whose codes would be too coarse."""
    x = torch.ones(WIDTH, WIDTH).cumsum(1) / WIDTH

    def loss(_: Any) -> Tensor:
        y = F.silu(x @ w[0])
        logarithm = _in_a_thread(lambda: _nodes((y.square() + 1e-6).log(), count))
        return (y @ w[1]).square().mean() + (logarithm @ w[2]).mean() + (y * y).mean()

    return lambda: None, loss


def sum_with_a_leaf(count: int, w: list[Tensor]) -> Any:
    p = w[3]

    def actor() -> Any:
        h = w[0] @ w[0]
        _nodes(h, count)
        results = h, h + p, p.to(torch.bfloat16), p * 1.5, p[None] * h
        with torch.no_grad():
            p.add_(5.0)  # which torch allows: none of the graphs has saved p but the last one
        return results[:4]

    def loss(results: Any) -> Tensor:
        h, total, cast, product = results
        first = (p * h).sum() * 0.0 + h.sin().sum()
        return first + (total @ w[2]).square().mean() + F.silu(cast.float() + h).mean() + (product * product).mean()

    return actor, loss


PROGRAMS = [tower_beside_tanh, tower_into_product, logarithm_of_saturated_gates, sum_with_a_leaf]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("bits", ["exact", 8])
def test_gradients_through_nodes_of_another_thread(program: Program, bits: Any) -> None:
    for count in (*range(12), 300):
        found = {}
        for mode in (None, bits):
            torch.manual_seed(0)
            w = [*(torch.randn(WIDTH, WIDTH) / 8 for _ in range(3)), torch.randn(WIDTH)]
            for each in w:
                each.requires_grad_()
            make, loss = program(count, w)

            def main() -> Any:
                made = _in_a_thread(make)  # noqa: B023
                if mode is None:  # noqa: B023
                    return torch.autograd.grad(loss(made), w, allow_unused=True)  # noqa: B023
                with memkern.quantize_saved(mode):  # noqa: B023
                    total = loss(made)  # noqa: B023
                return torch.autograd.grad(total, w, allow_unused=True)  # noqa: B023

            found[mode] = _in_a_thread(main)
        for a, b in zip(found[bits], found[None], strict=True):
            if b is not None:
                error = float((a - b).norm() / b.norm())
                assert error <= (1e-5 if bits == "exact" else 0.03), (count, error)


def test_one_object_in_two_threads() -> None:
    """Each thread's block closes its own hooks, in whatever order the blocks end."""
    context, entered, left = memkern.quantize_saved(8), threading.Event(), threading.Event()
    open_after: list[bool] = []

    def other() -> None:
        with context:
            entered.set()
            left.wait(10)
        open_after.append(torch._C._autograd._top_saved_tensors_default_hooks(False) is not None)

    thread = threading.Thread(target=other)
    with context:
        thread.start()
        entered.wait(10)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    left.set()
    thread.join()
    assert open_after == [False]
