"""HostOffload's steps go on from weights that others have changed since the last one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memkern import optim
from memkern.optim import HostOffload
from tests.support.helpers import assert_same
from tests.support.late_transfers import LateHostOffload
from tests.support.offloaded import MODES, losses, model_of, over_modes, over_transfers


def halve_vector(model: nn.Module) -> None:
    x = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(0.5 * x, model.parameters())


def prune_half(model: nn.Module) -> None:
    for p in model.parameters():
        p.data[p.data.abs() < p.data.abs().median()] = 0


EDITS: dict[str, Callable[[nn.Module], Any]] = {
    "load_state_dict": lambda model: model.load_state_dict(model_of(torch.float32).state_dict()),
    "vector_to_parameters": halve_vector,
    ".data": prune_half,
}


@pytest.mark.pairwise
@over_modes
@over_transfers
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("case", ["fp32 weights", "bf16+8", "torch's, fp32", "torch's, bf16"])
def test_a_step_goes_on_from_edited_weights(mode: str, wrapper: type[HostOffload], edit: str, case: str) -> None:
    """Like steps without HostOffload, and never from the weights before the edit."""
    dtype = torch.float32 if case == "torch's, fp32" else torch.bfloat16
    build: Any = torch.optim.AdamW if "torch" in case else optim.AdamW8bit
    options = {"lr": 1e-2} | ({} if "torch" in case else {"min_8bit_size": 0})
    in_memory = {"fp32 weights": {"master_weights": "bf16+16"}, "bf16+8": {"master_weights": "bf16+8"}}.get(case, {})
    on_host = in_memory if case == "bf16+8" else {}
    models = [model_of(dtype) for _ in range(2)]
    optimizers = [
        build(models[0].parameters(), **options, **in_memory),
        wrapper(build, models[1].parameters(), **MODES[mode], **options, **on_host),
    ]
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            losses(model, 1)[0].backward()
            if step == 1:
                EDITS[edit](model)  # between the backward pass and the step
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                EDITS[edit](model)  # between two steps
    if case == "torch's, bf16":  # without HostOffload it has no fp32 weights
        before = [p.detach().clone() for p in models[1].parameters()]
        EDITS[edit](models[1])
        edited = [p.detach().clone() for p in models[1].parameters()]
        losses(models[1], 1)[0].backward()
        optimizers[1].step()
        for p, x, y in zip(models[1].parameters(), edited, before, strict=True):
            assert ((p - x).abs() <= 0.011 + x.abs() / 128).all()  # lr, and a unit of bf16's last place
            assert not torch.equal(p, y)
    else:
        assert_same([p.detach() for p in models[1].parameters()], [p.detach() for p in models[0].parameters()])


@over_modes
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_model_that_changes_its_dtype(mode: str, dtype: torch.dtype) -> None:
    """Host memory in the old dtype takes no part in later steps."""
    results = []
    for wrapper in (HostOffload, LateHostOffload):
        model = model_of(torch.bfloat16)
        optimizer = wrapper(torch.optim.AdamW, model.parameters(), lr=1e-2, **MODES[mode])
        for step in range(4):
            if step == 2:
                model.to(dtype)
            losses(model, 1)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach() for p in model.parameters()])
    assert_same(*results)
