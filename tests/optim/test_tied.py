"""Parameters over one memory, optimizers over one parameter, and parameters that come late or leave."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR

from memkern import optim
from memkern.optim import HostOffload, StepInBackward
from tests.support.helpers import assert_same, over_optimizers

KINDS: dict[str, Callable[..., Any]] = {
    "StepInBackward": lambda params, **options: StepInBackward(optim.SGD, params, **options),
    "offload_gradients": lambda params, **options: HostOffload(optim.SGD, params, offload_gradients=True, **options),
    "step_in_backward": lambda params, **options: HostOffload(
        optim.SGD, params, step_on="device", step_in_backward=True, **options
    ),
}


# ---- one memory


@pytest.mark.pairwise
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("overlap", ["whole", "rows"])
@over_optimizers
def test_parameters_over_one_memory_are_stepped_one_after_the_other(build: type, overlap: str, when: str) -> None:
    """As torch.optim does: the second begins from what the first has written."""

    def run(together: bool) -> torch.Tensor:
        a, b = (nn.Parameter(torch.linspace(-1, 1, 128 * 512).view(128, 512)) for _ in range(2))
        tie = (lambda: a.data) if overlap == "whole" else (lambda: a.data[:64])
        if when == "before":
            b.data = tie()
        one = build([a, b], lr=1e-2) if together else build([a], lr=1e-2)
        other = None if together else build([b], lr=1e-2)
        if when == "after":
            b.data = tie()
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            for p in (a, b):
                p.grad = torch.randn(p.shape, generator=generator)
            for optimizer in (one, other):
                if optimizer is not None:
                    optimizer.step()
        return a.detach().clone()

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_same(run(True), run(False))
    finally:
        torch.set_num_threads(threads)


def test_parts_of_one_memory_are_stepped_together() -> None:
    whole = torch.zeros(64, 128)
    params = [nn.Parameter(part) for part in whole.chunk(2)]
    optimizer = optim.AdamW8bit(params, min_8bit_size=0)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[params[0]].plan.is_one_call


# ---- one parameter


@pytest.mark.parametrize("kind", KINDS)
def test_the_optimizer_that_was_made_last_has_the_gradients(kind: str) -> None:
    p = nn.Parameter(torch.zeros(400))
    old = KINDS[kind]([p], lr=1.0)
    scheduler = ConstantLR(old, factor=1.0)  # keeps it alive
    new = KINDS[kind]([p], lr=1e-3)
    p.sum().backward()
    new.step()
    torch.testing.assert_close(p.detach(), torch.full((400,), -1e-3))
    with pytest.raises(RuntimeError, match="made of the same parameters later"):
        old.step()
    del new
    gc.collect()
    p.sum().backward()
    scheduler.optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((400,), -1.001))


@pytest.mark.parametrize("kind", KINDS)
def test_copies_do_not_take_over(kind: str) -> None:
    """A copy has parameters of its own."""
    p = nn.Parameter(torch.zeros(400))
    optimizer = KINDS[kind]([p], lr=1.0)
    other = copy.deepcopy(optimizer)
    p.sum().backward()
    optimizer.step()
    assert p[0] == -1
    assert other.param_groups[0]["params"][0][0] == 0


# ---- parameters that leave and come


def test_a_parameter_that_left_the_groups_keeps_its_gradient() -> None:
    p, q = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    optimizer = StepInBackward(optim.SGD, [{"params": [p]}, {"params": [q]}], lr=1.0)
    (p + q).sum().backward()
    optimizer.step()
    group = optimizer.param_groups.pop()
    other = torch.optim.SGD([q], lr=1.0)
    for _ in range(3):
        (p + q).sum().backward()
        optimizer.step()
        other.step()
        other.zero_grad()
    assert p.tolist() == q.tolist() == [-4.0] * 4
    optimizer.param_groups.append(group)  # and back
    optimizer.step()
    (p + q).sum().backward()
    assert q.grad is None
    assert q.tolist() == [-5.0] * 4


def test_parameters_that_left_the_groups_are_freed() -> None:
    optimizer = StepInBackward(optim.SGD, [nn.Parameter(torch.zeros(4))], lr=1.0)
    p = nn.Parameter(torch.zeros(4))
    optimizer.add_param_group({"params": [p]})
    p.sum().backward()
    optimizer.step()
    optimizer.param_groups.pop()
    optimizer.state.pop(p, None)
    optimizer.step()
    gone = weakref.ref(p)
    del p
    gc.collect()
    assert gone() is None


@over_optimizers
def test_lazy_modules(build: type) -> None:
    """torch.optim takes their parameters before the first forward pass."""
    model = nn.Sequential(nn.LazyLinear(64), nn.LayerNorm(64))
    optimizer = build(model.parameters(), min_8bit_size=0)
    for _ in range(2):
        model(torch.ones(2, 128)).square().sum().backward()
        optimizer.step()
    assert all(optimizer.state[p]["step"] == 2 for p in model.parameters())
