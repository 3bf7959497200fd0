"""StepInBackward steps one parameter at a time, in constant time, and leaves the groups as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memkern import optim
from memkern.optim import StepInBackward
from tests.support.helpers import name_of


class Counted(list):  # type: ignore[type-arg]
    """A group's list of parameters that counts how many of them loops have visited."""

    visits = 0

    def __iter__(self) -> Any:
        for x in super().__iter__():
            Counted.visits += 1
            yield x


@pytest.mark.parametrize("build", [optim.AdamW8bit, optim.LAMB8bit, torch.optim.SGD], ids=name_of)
@pytest.mark.parametrize("groups", [1, 30])
def test_work_does_not_grow_with_the_number_of_parameters(build: type, groups: int) -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(60)]
    size = len(params) // groups
    split = [{"params": params[i : i + size]} for i in range(0, len(params), size)]
    optimizer = StepInBackward(build, split, lr=1e-2)
    for group in optimizer.param_groups:
        group["params"] = Counted(group["params"])
    for _ in range(2):
        Counted.visits = 0
        torch.cat([p * p for p in params]).sum().backward()
        assert Counted.visits <= 12 * len(params)  # a few times for the whole pass, not for each gradient
        optimizer.step()
    assert all((p != 1).all() for p in params)
    assert [len(group["params"]) for group in optimizer.param_groups] == [size] * groups


def test_a_parameter_that_changes_its_group_between_steps() -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    groups = [{"params": [first]}, {"params": [second], "lr": 1.0}]
    optimizer = StepInBackward(torch.optim.SGD, groups, lr=0.0)
    for moved in (False, True):
        if moved:
            optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
        (first + second).sum().backward()
        optimizer.step()
    assert first.tolist() == [0.0] * 3
    assert second.tolist() == [-1.0] * 3


def test_an_error_in_a_step_leaves_the_groups_as_they_were() -> None:
    params = [nn.Parameter(torch.ones(300)) for _ in range(3)]
    optimizer = StepInBackward(optim.AdamW8bit, params, lr=1e-2)
    sum((p * p).sum() for p in params).backward()
    optimizer.step()
    optimizer.state[params[1]]["exp_avg"] = torch.zeros(7)
    with pytest.raises((RuntimeError, ValueError)):
        sum((p * p).sum() for p in params).backward()
    assert [p is q for p, q in zip(optimizer.param_groups[0]["params"], params, strict=True)] == [True] * 3
    assert len(optimizer.param_groups) == 1
