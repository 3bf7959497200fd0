"""State dicts of torch.optim.Muon and torch.optim.AdamW are converted to one of memkern.optim.Muon."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from memkern import optim
from memkern.optim import Muon, Muon8bit, from_torch_muon_state_dict
from tests.support.convert_helpers import copies_of, train, value
from tests.support.helpers import assert_same

MUON: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "nesterov": False, "weight_decay": 0.05, "eps": 1e-6}
ADAMW: dict[str, Any] = {"lr": 3e-3, "betas": (0.8, 0.97), "eps": 1e-7, "weight_decay": 0.1}


def make_params() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices for Muon, and parameters for AdamW."""
    torch.manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape)) for shape in ((40, 300), (64, 64), (10, 512))]
    return matrices, [nn.Parameter(torch.randn(shape)) for shape in ((300,), (90, 64))]


def torch_optimizers(matrices: Any, others: Any) -> tuple[Any, Any]:
    muon = torch.optim.Muon([{"params": matrices[:1]}, {"params": matrices[1:]}], **MUON)
    return muon, torch.optim.AdamW(others, **ADAMW)


def memkern_optimizer(cls: Any, matrices: Any, others: Any, **options: Any) -> Any:
    groups = [
        {"params": matrices[:1]},
        {"params": others, "algorithm": "adamw", "lr": 1.0},
        {"params": matrices[1:]},
    ]
    return cls(groups, lr=0.5, min_8bit_size=0, **options)


def test_training_goes_on_from_torchs_states() -> None:
    matrices, others = make_params()
    muon, adamw = torch_optimizers(matrices, others)
    train(muon, matrices, 3), train(adamw, others, 3)
    before = copy.deepcopy((muon.state_dict(), adamw.state_dict()))
    copied, copied_others = copies_of(matrices), copies_of(others)
    optimizer = memkern_optimizer(Muon, copied, copied_others)
    optimizer.load_state_dict(from_torch_muon_state_dict(optimizer, muon.state_dict(), adamw.state_dict()))
    assert_same((muon.state_dict(), adamw.state_dict()), before)
    assert [g["lr"] for g in optimizer.param_groups] == [0.02, 3e-3, 0.02]
    assert optimizer.param_groups[2]["nesterov"] is False
    for step in range(3, 6):
        train(muon, matrices, 1, step), train(adamw, others, 1, step)
        grads = [p.grad for p in (*matrices, *others)]
        for p, g in zip((*copied, *copied_others), grads, strict=True):
            p.grad = None if g is None else g.clone()
        optimizer.step()
    for p, q in zip((*copied, *copied_others), (*matrices, *others), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


def test_states_are_quantized_for_muon8bit() -> None:
    matrices, others = make_params()
    muon, adamw = torch_optimizers(matrices, others)
    train(muon, matrices, 3), train(adamw, others, 3)
    optimizer = memkern_optimizer(Muon8bit, copies_of(matrices), copies_of(others))
    optimizer.load_state_dict(from_torch_muon_state_dict(optimizer, muon.state_dict(), adamw.state_dict()))
    group = optimizer.param_groups[2]
    p = group["params"][0]
    state = optimizer.state[p]
    assert state["momentum_buffer"].dtype == torch.int8
    expected = muon.state[matrices[1]]["momentum_buffer"]
    assert (value(state, "momentum_buffer", group) - expected).norm() < 0.02 * expected.norm()
    assert optimizer.state[optimizer.param_groups[1]["params"][1]]["exp_avg_sq"].dtype == torch.uint8


def test_without_a_state_of_adamw_its_groups_begin_anew() -> None:
    matrices, others = make_params()
    muon, _ = torch_optimizers(matrices, others)
    train(muon, matrices, 2)
    optimizer = memkern_optimizer(Muon, matrices, others)
    optimizer.load_state_dict(from_torch_muon_state_dict(optimizer, muon.state_dict()))
    assert not any(optimizer.state.get(p) for p in others)
    assert optimizer.param_groups[1]["lr"] == 1.0


def test_what_does_not_fit_is_refused() -> None:
    matrices, others = make_params()
    muon, adamw = torch_optimizers(matrices, others)
    train(muon, matrices, 1)
    optimizer = memkern_optimizer(Muon, matrices, others)
    good = muon.state_dict()
    matrix_state = {"exp_avg": torch.zeros(40, 300)}
    small_state = {"momentum_buffer": torch.zeros(4, 3)}
    # the state_dict of Muon, that of AdamW, the error and its message
    cases: list[tuple[Any, Any, type, str]] = [
        (muon, None, TypeError, "state_dict must be an optimizer's"),
        (adamw.state_dict(), None, ValueError, r"state_dict must have 1 parameters in group 0, .* groups of \[2\]"),
        (good, good, ValueError, r"adamw must have 2 parameters in group 0, .* groups of \[1, 2\]"),
        ({**good, "param_groups": [*good["param_groups"], {"params": []}]}, None, ValueError, "must have 2 groups"),
        ({**good, "state": {0: matrix_state}}, None, ValueError, "must have momentum_buffer"),
        ({**good, "state": {0: small_state}}, None, ValueError, r"must have its parameter's shape \(40, 300\)"),
    ]
    for state_dict, adamw_state_dict, error, message in cases:
        with pytest.raises(error, match=message):
            from_torch_muon_state_dict(optimizer, state_dict, adamw_state_dict)
    with pytest.raises(TypeError, match=r"optimizer must be a memkern.optim.Muon, got memkern.optim.adam.AdamW"):
        from_torch_muon_state_dict(optim.AdamW(matrices), good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the state_dict is not one of memkern's Muon: .*from_torch_muon_state_dict"):
        Muon(matrices).load_state_dict(torch.optim.Muon(matrices).state_dict())
