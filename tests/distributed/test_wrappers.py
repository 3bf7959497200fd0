"""StepInBackward steps sharded parameters, and states follow models that are sharded after two steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from memkern import optim
from tests.support.helpers import assert_same
from tests.support.ranks import Ranks
from tests.support.sharded import full_params_and_states, gpt, in_shards, muon_groups, run_in_one_process, steps


def train(new: Any, in_backward: bool) -> Any:
    """Parameters and states after three steps, and whether the gradients were freed in each backward pass."""
    model = in_shards(gpt())
    params: Any = muon_groups(model.parameters()) if new is optim.Muon8bit else model.parameters()
    optimizer = optim.StepInBackward(new, params, lr=1e-3) if in_backward else new(params, lr=1e-3)
    freed = []
    for step in range(3):
        tokens = torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(step))
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        freed.append(all(p.grad is None for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return full_params_and_states(model, optimizer), freed


@pytest.mark.feature("torch", "`StepInBackward` under `fully_shard`: bits of the step after the backward pass")
@pytest.mark.full
@pytest.mark.parametrize("new", [optim.AdamW8bit, optim.LAMB8bit, optim.Muon8bit])
def test_a_step_in_backward_has_the_bits_of_one_after_it(ranks: Ranks, new: Any) -> None:
    after_backward, in_backward = ranks(2, train, new, False), ranks(2, train, new, True)
    for (expected, freed_after), (result, freed_in) in zip(after_backward, in_backward, strict=True):
        assert_same(result, expected)
        assert (freed_after, freed_in) == ([False] * 3, [True] * 3)


def shard_after_two_steps(new: Any, options: dict[str, Any]) -> Any:
    model = gpt()
    optimizer = new(model.parameters(), **options)
    steps(model, optimizer, 0, 2)
    in_shards(model)
    optimizer.param_groups[0]["params"] = [*model.parameters()]
    steps(model, optimizer, 2, 4)
    return full_params_and_states(model, optimizer)


@pytest.mark.full
def test_states_move_to_the_shards_of_a_model(ranks: Ranks) -> None:
    expected = run_in_one_process(gpt, optim.AdamW8bit, {"lr": 1e-3}, 4)
    for rank in ranks(2, shard_after_two_steps, optim.AdamW8bit, {"lr": 1e-3}):
        assert_same(rank, expected)
