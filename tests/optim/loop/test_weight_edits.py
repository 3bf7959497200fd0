"""master_weights: bf16 weights that are edited between two steps, states of another option, fp32 state dicts."""

import copy
import re
import warnings

import pytest
import torch

from memkern import optim
from tests.support.bf16_weights import (
    BF16,
    MASTER_WEIGHTS,
    OPTIONS,
    bf16_params,
    fp32_weights,
    over_master_weights,
    over_options,
)
from tests.support.helpers import (
    assert_same,
    name_of,
    on,
    over_fast,
    snapshot,
    train,
)
from tests.support.hostile_weights import hostile
from tests.support.interpreted import interpreted

# ---- edits of weights between two steps


@over_master_weights
def test_no_state_makes_another_number_of_a_weight(master_weights: str) -> None:
    p, state = hostile(master_weights)
    x, bits = optim.weights.fp32_weight(p, {"weight_error": state}), lambda x: x.float().view(torch.int32).long()
    assert_same(x.isnan(), p.isnan())
    is_number = ~p.isnan()
    assert ((bits(x) - bits(p)).abs() <= 2**15)[is_number].all()  # half a unit of p: no sign changes, nothing overflows
    error = state.long() << (8 if master_weights == "bf16+8" else 0)
    impossible = (p == 0) & (error < 0) | p.isinf() & (error > 0)  # no step makes such an error: it counts as 0
    assert_same(bits(x)[is_number], (bits(p) + error * ~impossible)[is_number])
    assert x.isfinite()[p.isfinite()].all()


@pytest.mark.pairwise
@interpreted(build=(optim.AdamW, optim.Lion))
@over_fast
@over_master_weights
@pytest.mark.parametrize("build", [optim.AdamW, optim.Lion, optim.SGD], ids=name_of)
@pytest.mark.parametrize("state_bits", [8, 32])
def test_a_step_with_lr_0_changes_no_weight(backend: str, master_weights: str, build: type, state_bits: int) -> None:
    """Also with errors that no step makes, which all backends correct alike."""
    runs = []
    for name in (backend, "reference"):
        p, state = hostile(master_weights)
        w = torch.nn.Parameter(p.clone())
        optimizer = build(
            [w], lr=0.0, weight_decay=0.0, state_bits=state_bits, min_8bit_size=0, master_weights=master_weights
        )
        w.grad = torch.zeros_like(w)
        optimizer.state[w] = optimizer._init_state(w, optimizer.param_groups[0])
        optimizer.state[w]["weight_error"].copy_(state)
        with on(name):
            optimizer.step()
        assert_same(w.detach(), p)
        runs.append(snapshot(optimizer))
    assert_same(*runs)


@over_fast
@over_master_weights
@pytest.mark.parametrize("build", [optim.LAMB8bit, optim.LARS8bit], ids=name_of)
def test_a_zeroed_layer_starts_again(backend: str, master_weights: str, build: type) -> None:
    """Errors that the state keeps beside zeros make no norm for a trust ratio: weights move as plain bf16 ones do."""
    moved = []
    for option in (master_weights, None):
        torch.manual_seed(0)
        w = torch.nn.Parameter(torch.randn(64, 128).to(BF16))
        optimizer = build([w], lr=1e-2, master_weights=option)
        for step in range(6):
            w.grad = torch.randn(w.shape).to(BF16)
            with on(backend), torch.no_grad():
                if step == 3:
                    w.zero_()
                optimizer.step()
        moved.append(w.detach().abs().float().mean().item())
    assert moved[0] == pytest.approx(moved[1], rel=0.05)


@over_options
@pytest.mark.parametrize("edit", ["none", "average swapped in and out", "clamp_", "restored through .data", "strides"])
def test_edits_that_keep_the_values_lose_nothing(option: str, edit: str) -> None:
    """200 steps of 1e-4, each a hundredth of a unit in the last place, add up to 0.02."""
    p = torch.nn.Parameter(torch.full((64, 128), 1.5, dtype=BF16))
    optimizer = optim.AdamW8bit([p], lr=1e-4, weight_decay=0.0, **OPTIONS[option])
    average = torch.full_like(p, 1.25)
    for step in range(200):
        p.grad = torch.ones_like(p)
        optimizer.step()
        with torch.no_grad():
            if edit == "clamp_":
                p.clamp_(-10, 10)
            elif step % 10 == 0 and edit == "average swapped in and out":
                original = p.clone()
                p.copy_(average)
                p.copy_(original)
            elif edit == "restored through .data":  # as sharpness-aware minimization does
                original = p.data.clone()
                p.add_(0.1)
                p.data = original
            elif edit == "strides" and step % 10 == 0:
                p.data = p.data.contiguous() if step % 20 else p.data.t().contiguous().t()
    assert abs(1.5 - fp32_weights(optimizer)[0].double().mean().item() - 0.02) < 0.002


# ---- state dicts


def test_the_optimizers_own_option_wins_over_a_states() -> None:
    params = bf16_params()
    for target_option in (None, *MASTER_WEIGHTS):
        for source_option in (None, *MASTER_WEIGHTS):
            source = optim.AdamW8bit(params, lr=1e-2, master_weights=source_option)
            train(source, 2)
            target = optim.AdamW8bit(params, master_weights=target_option)
            if target_option == source_option:
                target.load_state_dict(source.state_dict())
            else:
                with pytest.warns(UserWarning, match=re.escape(f"master_weights {source_option} -> {target_option}")):
                    target.load_state_dict(source.state_dict())
            assert target.param_groups[0]["master_weights"] == target_option
            if None not in (target_option, source_option):
                for x, y in zip(fp32_weights(target), fp32_weights(source), strict=True):
                    assert ((x - y).abs() <= 2**-15 * y.abs() + 1e-38).all()
            train(target, 1)


@over_master_weights
def test_a_weight_error_that_does_not_fit_is_refused(master_weights: str) -> None:
    optimizer = optim.AdamW8bit(bf16_params(), master_weights=master_weights)
    train(optimizer, 1)
    key = "weight_error"
    for value, message in (
        (torch.zeros(64, 128, dtype=torch.int32), f"{key} must be torch"),
        (torch.zeros(3), f"{key} must be torch"),
        (None, "expected"),
    ):
        state_dict = copy.deepcopy(optimizer.state_dict())
        if value is None:
            del state_dict["state"][0][key]
        else:
            state_dict["state"][0][key] = value
        with pytest.raises(ValueError, match=message):
            optim.AdamW8bit(bf16_params(), master_weights=master_weights).load_state_dict(state_dict)


@over_master_weights
def test_fp32_state_dicts_have_and_restore_the_fp32_weights(master_weights: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.BatchNorm1d(64)).to(BF16)
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-2, master_weights=master_weights)
    train(optimizer, 3)
    state_dict = optim.to_fp32_state_dict(model, optimizer)
    assert {*state_dict} == {*model.state_dict()}
    weights = fp32_weights(optimizer)
    for (name, _), x in zip(model.named_parameters(), weights, strict=True):
        assert_same(state_dict[name], x)
    assert any((x != x.to(BF16).float()).any() for x in weights)
    assert state_dict["1.running_mean"].dtype == BF16
    other_model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.BatchNorm1d(64)).to(BF16)
    loaded = optim.AdamW8bit(other_model.parameters(), lr=1e-2, master_weights=master_weights)
    optim.load_fp32_state_dict(other_model, loaded, state_dict)
    assert_same(optim.to_fp32_state_dict(other_model, loaded), state_dict)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(loaded, 1)
    with torch.no_grad():
        model[0].weight.zero_()
    # A step would read up to 4.6e-41 there, half a unit of 0, from the kept errors; the state_dict has 0.
    assert any((x.abs() > 0).any() for x in fp32_weights(optimizer)[:1])
    assert (optim.to_fp32_state_dict(model, optimizer)["0.weight"] == 0).all()
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got dict"):
        optim.to_fp32_state_dict({}, optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer must be one of memkern.optim's, got torch.optim"):
        optim.load_fp32_state_dict(model, torch.optim.SGD(model.parameters()), state_dict)  # type: ignore[arg-type]
