"""States follow groups that change between steps: parameters that are replaced, come or go, options, wrappers."""

from __future__ import annotations

import copy
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from memkern import optim
from tests.support.convert_helpers import copies_of
from tests.support.helpers import assert_same, give_gradients, make_params, over_kinds, snapshot, train

SHAPES = ((40, 128), (96, 64), (64,))


# ---- parameters in place of others


@pytest.mark.parametrize("in_place", [True, False])
@over_kinds
def test_states_go_to_the_parameters_that_replace_theirs(build: Any, in_place: bool) -> None:
    straight, swapped = build(make_params(SHAPES), lr=1e-2), build(make_params(SHAPES), lr=1e-2)
    for optimizer in (straight, swapped):
        train(optimizer, 2)
    group = swapped.param_groups[0]
    group["params"][:] = copies_of(group["params"])
    if not in_place:
        group["params"] = [*group["params"]]
    for optimizer in (straight, swapped):
        train(optimizer, 2, first=2)
    assert_same(snapshot(swapped), snapshot(straight))
    assert len(swapped.state) == len(SHAPES)


def test_states_go_to_new_parameters_that_have_the_ids_of_freed_ones() -> None:
    """A frozen parameter, which has no state, is freed before the next one is made. That one often gets its id."""
    groups: Any = [{"params": make_params([shape] * 8)} for shape in ((64,), (40, 128))]
    optimizer = optim.AdamW8bit(groups)
    frozen, trained = (group["params"] for group in optimizer.param_groups)
    del groups
    for p in trained:
        p.grad = torch.ones_like(p)
    optimizer.step()
    old_ids = {id(p) for p in frozen}
    for i in range(8):
        for params in (frozen, trained):
            params[i] = nn.Parameter(params[i].detach().clone())
    assert any(id(p) in old_ids for p in trained)
    for p in trained:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in trained] == [2.0] * 8
    assert len(optimizer.state) == 8


def test_a_state_dict_right_after_parameters_are_replaced_has_their_states() -> None:
    optimizer = optim.AdamW8bit(make_params(SHAPES))
    train(optimizer, 2)
    expected = copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[0]["params"] = copies_of(optimizer.param_groups[0]["params"])
    assert_same(optimizer.state_dict(), expected)


def test_another_shape_raises_before_anything_is_changed() -> None:
    optimizer = optim.AdamW8bit(make_params(SHAPES))
    train(optimizer, 2)
    before = copy.deepcopy(snapshot(optimizer)["states"])
    old = [*optimizer.state]
    params = copies_of(make_params(SHAPES, 1))
    params[1] = nn.Parameter(torch.zeros(96, 65))
    optimizer.param_groups[0]["params"] = params
    unchanged = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=r"group 0 had one of shape \(96, 64\) with a state at 1"):
        train(optimizer, 1, first=2)
    assert_same([p.detach() for p in params], unchanged)
    assert all(a is b for a, b in zip(optimizer.state, old, strict=True))
    assert_same([*optimizer.state.values()], before)
    optimizer.state.clear()  # what the message asks for
    train(optimizer, 1, first=2)


def test_a_parameter_that_left_a_group_and_a_new_one_in_another_group_raise() -> None:
    a, b, c = make_params(SHAPES)
    optimizer = optim.AdamW8bit([{"params": [a, b]}, {"params": [c]}])
    train(optimizer, 1)
    optimizer.param_groups[0]["params"] = [b]
    optimizer.param_groups[1]["params"] = [c, *copies_of([a])]
    with pytest.raises(ValueError, match=r"group 0 had one of shape \(40, 128\) with a state at 0"):
        train(optimizer, 1, first=1)


def test_parameters_that_leave_and_come_back_keep_their_states() -> None:
    optimizer = optim.AdamW8bit(make_params(SHAPES))
    train(optimizer, 2)
    first, *others = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = others  # the first parameter leaves, as one that is frozen
    train(optimizer, 1, first=2)
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.zeros(40, 128)), first, *others]
    train(optimizer, 1, first=3)
    steps = [float(optimizer.state[p]["step"]) for p in optimizer.param_groups[0]["params"]]
    assert steps == [1, 3, 4, 4]


def test_a_group_extended_by_an_unnamed_parameter_has_numbers_for_names() -> None:
    named = [(name, p) for name, p in zip("abc", make_params(SHAPES), strict=True)]
    optimizer = optim.LAMB8bit(named[:2])
    optimizer.param_groups[0]["params"].append(named[2][1])
    train(optimizer, 1)
    assert [*optimizer.trust_ratios()] == ["0", "1", "2"]
    optimizer.state[named[2][1]]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"exp_avg of parameter 2 \(shape .* must be of shape"):
        train(optimizer, 1, first=1)


# ---- options


def test_max_grad_norm_is_one_for_all_groups() -> None:
    params = make_params(SHAPES)
    optimizer = optim.AdamW8bit([{"params": params[:2]}, {"params": params[2:]}])
    optimizer.param_groups[1]["max_grad_norm"] = 0.5
    with pytest.raises(ValueError, match=r"max_grad_norm .* set it in all groups, got None, 0\.5"):
        train(optimizer, 1)
    for group in optimizer.param_groups:
        group["max_grad_norm"] = -1.0
    with pytest.raises(ValueError, match="max_grad_norm must be None or more than 0"):
        train(optimizer, 1)


# ---- wrappers


def test_flat_parts_of_deepspeed_raise_where_norms_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    for new, options in ((optim.LAMB8bit, {}), (optim.AdamW8bit, {"max_grad_norm": 1.0})):
        optimizer = new(make_params(SHAPES), **options)
        optimizer.param_groups[0]["params"] = [nn.Parameter(torch.randn(5664))]  # as ZeRO's stages 1 and 2 do
        with pytest.raises(RuntimeError, match="DeepSpeed's ZeRO leaves this rank a flat part"):
            train(optimizer, 1)
    optimizer = optim.AdamW8bit(make_params(SHAPES))
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.randn(5664))]
    train(optimizer, 1)


def test_a_states_entries_of_other_libraries_survive() -> None:
    """timm's Lookahead keeps its slow weights in the state; torch.optim saves and loads such entries."""
    optimizer = optim.AdamW8bit(make_params(SHAPES), lr=1e-2)
    train(optimizer, 1)
    for p, state in optimizer.state.items():
        state["lookahead_slow_buff"], state["ema"] = p.detach().clone(), 0.5
    saved = copy.deepcopy(optimizer.state_dict())
    loaded = optim.AdamW8bit(copies_of(make_params(SHAPES)), state_bits=32)
    with pytest.warns(UserWarning, match="state_bits 8 -> 32"):
        loaded.load_state_dict(saved)
    loaded.param_groups[0]["state_bits"] = 8
    loaded.param_groups[0]["params"] = copies_of(loaded.param_groups[0]["params"])
    give_gradients(loaded.param_groups[0]["params"], 1)
    loaded.step()
    for state, expected in zip(loaded.state.values(), saved["state"].values(), strict=True):
        assert_same(state["lookahead_slow_buff"], expected["lookahead_slow_buff"])
        assert state["ema"] == 0.5


def test_a_state_loads_under_fake_tensor_mode() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        optimizer = optim.AdamW8bit([nn.Parameter(torch.zeros(64, 128))])
        optimizer.param_groups[0]["params"][0].grad = torch.zeros(64, 128)
        optimizer.step()
        loaded = optim.AdamW8bit([nn.Parameter(torch.zeros(64, 128))])
        loaded.load_state_dict(optimizer.state_dict())
        assert next(iter(loaded.state.values()))["exp_avg"].dtype == torch.int8


@over_kinds
def test_steps_and_loads_where_meta_is_the_default_device(build: Any) -> None:
    straight, under_meta = build(make_params(SHAPES)), build(make_params(SHAPES))
    train(straight, 2)
    for step in range(2):
        give_gradients(under_meta.param_groups[0]["params"], step)
        with torch.device("meta"):
            under_meta.step()
            loaded = build(copies_of(under_meta.param_groups[0]["params"]))
            loaded.load_state_dict(under_meta.state_dict())
        assert_same(loaded.state_dict()["state"], under_meta.state_dict()["state"])
    assert_same(snapshot(under_meta), snapshot(straight))
