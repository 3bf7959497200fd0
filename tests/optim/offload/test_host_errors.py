"""HostOffload refuses bad options and classes, a GradScaler with offloaded gradients, and bad gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from memkern import optim
from memkern.optim import HostOffload
from tests.support.late_transfers import LateHostOffload
from tests.support.offloaded import ON_DEVICE

# options, the error's message
BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"host_dtype": torch.bfloat16}, "host_dtype must be None, torch.float32 or torch.float64, got"),
    ({"step_in_backward": True}, "step_in_backward must be False with step_on='cpu', got True: .*device"),
    ({"step_on": "gpu"}, "step_on must be 'cpu' or 'device', got 'gpu'"),
    ({"device_state_bytes": 0}, "no device_state_bytes any more: step_on='device'"),
    ({"offload_gradients": True, **ON_DEVICE["device"]}, "offload_gradients is for step_on='cpu'"),
    ({"host_dtype": torch.float64, **ON_DEVICE["device"]}, "host_dtype is for step_on='cpu'"),
    ({"capturable": True, **ON_DEVICE["device"]}, "capturable must be False with step_on='device'"),
    ({"max_grad_norm": 1.0, **ON_DEVICE["device, in backward"]}, "max_grad_norm must be None, got 1.0"),
    ({"lr": -1.0}, "lr must be 0 or more"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        HostOffload(optim.AdamW, [nn.Parameter(torch.ones(3))], **options)


def test_classes_that_are_refused() -> None:
    params = [nn.Parameter(torch.ones(3))]
    for step_on in ("cpu", "device"):
        for optimizer_class in (torch.optim.LBFGS, HostOffload, "AdamW"):
            with pytest.raises(TypeError, match="optimizer_class must be"):
                HostOffload(optimizer_class, params, step_on=step_on)
    with pytest.raises(TypeError, match=r"one of memkern.optim with step_on='device', got torch.optim.adamw.AdamW"):
        HostOffload(torch.optim.AdamW, params, step_on="device")


def test_a_scaler_needs_gradients_on_the_device() -> None:
    p = nn.Parameter(torch.ones(5))
    optimizer, scaler = HostOffload(optim.AdamW, [p], offload_gradients=True), torch.amp.GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    with pytest.raises(RuntimeError, match=r"a GradScaler cannot be used with this HostOffload.*offload_gradients"):
        scaler.step(optimizer)


@pytest.mark.parametrize("mode", [{}, *ON_DEVICE.values()], ids=str)
def test_a_bad_gradient_is_refused_before_anything_is_changed(mode: dict[str, Any]) -> None:
    a, b = nn.Parameter(torch.ones(400)), nn.Parameter(torch.ones(400, 2))
    optimizer = LateHostOffload(optim.AdamW, [a, b], **mode)
    a.grad = torch.ones(400)
    b.grad = torch.sparse_coo_tensor([[0]], torch.ones(1, 2), (400, 2), check_invariants=True)
    with pytest.raises(RuntimeError, match=r"dense gradients, got torch\.sparse_coo"):
        optimizer.step()
    assert torch.equal(a, torch.ones(400))
    b.grad = torch.ones(400, 2)
    optimizer.step()
    assert float(optimizer.state[a]["step"]) == 1


def test_fp32_weights_of_another_model_are_refused() -> None:
    model = nn.Linear(64, 128).bfloat16()
    optimizer = HostOffload(optim.AdamW8bit, model.parameters())
    model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    weights = optim.to_fp32_state_dict(model, optimizer)
    with pytest.raises(ValueError, match="is model a copy, or optimizer the inner one of a HostOffload"):
        optim.to_fp32_state_dict(copy.deepcopy(model), optimizer)
    with pytest.raises(TypeError, match="HostOffload"):
        optim.load_fp32_state_dict(model, optimizer, weights)
