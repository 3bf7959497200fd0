"""Exporters between a change of the groups and the next step: they see what that step would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkern import optim
from tests.support.helpers import assert_same

EXPORTS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "torch": (optim.AdamW8bit, lambda o: optim.to_torch_state_dict(o)["state"]),
    "trust ratios": (optim.LAMB8bit, lambda o: o.trust_ratios()),
}


def stepped(build: Any, **options: Any) -> tuple[nn.Linear, Any]:
    torch.manual_seed(0)
    model = nn.Linear(64, 128, bias=False).bfloat16()
    optimizer = build(model.parameters(), lr=1e-2, **options)
    model.weight.grad = torch.randn_like(model.weight)
    optimizer.step()
    return model, optimizer


def replace(model: nn.Linear, optimizer: Any) -> None:
    """As a wrapper does."""
    model.weight = nn.Parameter(model.weight.detach().clone())
    optimizer.param_groups[0]["params"][0] = model.weight


@pytest.mark.parametrize("name", EXPORTS)
def test_the_state_of_a_replaced_parameter_is_exported(name: str) -> None:
    build, export = EXPORTS[name]
    model, optimizer = stepped(build, min_8bit_size=0)
    expected = export(optimizer)
    replace(model, optimizer)
    old = [*optimizer.state]
    assert_same(export(optimizer), expected)
    assert [*optimizer.state] == old  # nothing of the optimizer is changed


def fp32(model: nn.Module, optimizer: Any) -> Tensor:
    return optim.to_fp32_state_dict(model, optimizer)["weight"]


@pytest.mark.parametrize("kept", ["bf16+8", "bf16+16"])
def test_fp32_weights_of_a_replaced_parameter(kept: str) -> None:
    model, optimizer = stepped(optim.AdamW8bit, master_weights=kept)
    expected = fp32(model, optimizer).clone()
    assert not torch.equal(expected, model.weight.float())
    replace(model, optimizer)
    assert torch.equal(fp32(model, optimizer), expected)
    new = expected * 1.001
    optim.load_fp32_state_dict(model, optimizer, {"weight": new})
    (state,) = optimizer.state_dict()["state"].values()
    assert int(state["step"]) == 1  # moments and counter are the old parameter's
    torch.testing.assert_close(fp32(model, optimizer), new, rtol=0 if kept != "bf16+8" else 2.0**-16, atol=0)


def test_fp32_weights_are_loaded_into_an_option_that_was_set_since_the_step() -> None:
    model, optimizer = stepped(optim.AdamW8bit)
    optimizer.param_groups[0]["master_weights"] = "bf16+16"
    new = model.weight.detach().float() * 1.001
    optim.load_fp32_state_dict(model, optimizer, {"weight": new})
    assert torch.equal(fp32(model, optimizer), new)


@pytest.mark.parametrize("mode", [{}, {"offload_gradients": True}, {"step_in_backward": True}])
def test_the_inner_optimizer_has_the_groups_options(mode: dict[str, bool]) -> None:
    _, optimizer = stepped(lambda params, **options: optim.HostOffload(optim.AdamW8bit, params, **mode, **options))
    optimizer.param_groups[0]["lr"] = 0.25  # as a scheduler does after the step
    assert optim.to_torch_state_dict(optimizer.inner)["param_groups"][0]["lr"] == 0.25
