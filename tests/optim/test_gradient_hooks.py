"""Optimizers that take gradients in the backward pass: two over one parameter, and parameters that leave a group."""

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

# The optimizers whose hooks on parameters take gradients in the backward pass.
KINDS: dict[str, Callable[..., Any]] = {
    "StepInBackward": lambda params, **options: StepInBackward(optim.SGD, params, **options),
    "offload_gradients": lambda params, **options: HostOffload(optim.SGD, params, offload_gradients=True, **options),
    "step_in_backward": lambda params, **options: HostOffload(
        optim.SGD, params, step_on="device", step_in_backward=True, **options
    ),
}


# ---- several optimizers over one parameter


@pytest.mark.parametrize("kind", KINDS)
def test_the_optimizer_that_was_made_last_has_the_gradients(kind: str) -> None:
    p = nn.Parameter(torch.zeros(400))
    old = KINDS[kind]([p], lr=1.0)
    scheduler = ConstantLR(old, factor=1.0)  # keeps the old optimizer alive
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
def test_a_deepcopy_takes_no_gradients_of_the_original(kind: str) -> None:
    p = nn.Parameter(torch.zeros(400))
    optimizer = KINDS[kind]([p], lr=1.0)
    copied = copy.deepcopy(optimizer)
    p.sum().backward()
    optimizer.step()
    assert p[0] == -1
    assert copied.param_groups[0]["params"][0][0] == 0


# ---- parameters that leave a group and come back


def test_a_parameter_that_left_the_groups_keeps_its_gradient() -> None:
    p, q = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    optimizer = StepInBackward(optim.SGD, [{"params": [p]}, {"params": [q]}], lr=1.0)
    (p + q).sum().backward()
    optimizer.step()
    group = optimizer.param_groups.pop()
    sgd = torch.optim.SGD([q], lr=1.0)
    for _ in range(3):
        (p + q).sum().backward()
        optimizer.step()
        sgd.step()
        sgd.zero_grad()
    assert p.tolist() == q.tolist() == [-4.0] * 4
    optimizer.param_groups.append(group)
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
    ref = weakref.ref(p)
    del p
    gc.collect()
    assert ref() is None
