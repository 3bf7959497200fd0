"""What users do to states, groups and parameters between two steps that share a plan."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memkern import optim
from memkern.optim.state import State
from tests.support.helpers import assert_same, give_gradients, make_params, snapshot

SHAPES = [(64, 128), (40, 128), (300,)]


def new(**options: Any) -> optim.AdamW8bit:
    return optim.AdamW8bit(make_params(SHAPES), min_8bit_size=0, **options)


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def step(optimizer: torch.optim.Optimizer, seed: int, without: int | None = None) -> None:
    params = params_of(optimizer)
    give_gradients(params, seed)
    if without is not None:
        params[without].grad = None
    optimizer.step()


def plan_of(optimizer: torch.optim.Optimizer, i: int = 0) -> Any:
    return optimizer.state[params_of(optimizer)[i]].plan


def replaced_entry(o: optim.AdamW8bit) -> None:
    state = o.state[params_of(o)[1]]
    state["exp_avg"] = state["exp_avg"].clone()


def reset_by_entry(o: optim.AdamW8bit) -> None:
    state = o.state[params_of(o)[1]]
    state.update({key: torch.zeros_like(x) for key, x in state.items()})


def cleared(o: optim.AdamW8bit) -> None:
    o.state.clear()


def of_one_taken_out(o: optim.AdamW8bit) -> None:
    del o.state[params_of(o)[0]]


def plain_dicts(o: optim.AdamW8bit) -> None:
    for p in params_of(o):
        o.state[p] = {key: x.clone() for key, x in o.state[p].items()}


def without_format(o: optim.AdamW8bit) -> None:  # as Lightning moves states
    for p in params_of(o):
        o.state[p] = State({key: x.clone() for key, x in o.state[p].items()})


def swapped(o: optim.AdamW8bit) -> None:
    a, b, *_ = params_of(o)
    o.state[a], o.state[b] = o.state[b], o.state[a]
    a.data, b.data = b.data, a.data


def other_group(o: optim.AdamW8bit) -> None:
    p = o.param_groups[0]["params"].pop()
    o.add_param_group({"params": [p], "lr": 0.1})


def other_order(o: optim.AdamW8bit) -> None:
    o.param_groups[0]["params"].reverse()


def stochastic(o: optim.AdamW8bit) -> None:
    o.param_groups[0]["block_size"] = 64


def channels_last(o: optim.AdamW8bit) -> None:
    p = params_of(o)[0]
    p.data = p.data.t().contiguous().t()


def half(o: optim.AdamW8bit) -> None:
    for p in params_of(o):
        p.data = p.data.bfloat16()
        p.grad = None


def loaded(o: optim.AdamW8bit) -> None:
    o.load_state_dict(copy.deepcopy(o.state_dict()))


EDITS = [
    replaced_entry, reset_by_entry, cleared, of_one_taken_out, plain_dicts, without_format, swapped, other_group,
    other_order, stochastic, channels_last, half, loaded,
]  # fmt: skip


def named(edit: Callable[..., None]) -> str:
    return edit.__name__


@pytest.mark.parametrize("edit", EDITS, ids=named)
def test_a_step_after_an_edit_is_that_of_a_new_plan(edit: Callable[[optim.AdamW8bit], None]) -> None:
    """Bit for bit the steps of an optimizer whose plans are forgotten before each step."""
    one, other = new(), new()
    for i in range(6):
        if i in (2, 4):
            edit(one)
            edit(other)
        for state in other.state.values():
            if isinstance(state, State):
                state.plan = state._checked = None
        step(one, i)
        step(other, i)
    assert_same(snapshot(one), snapshot(other))


def test_a_plan_holds_while_nothing_changes() -> None:
    optimizer = new()
    step(optimizer, 0)
    first = plan_of(optimizer)
    for i in range(3):
        optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
        optimizer.param_groups[0]["betas"] = (0.8, 0.9)
        step(optimizer, i)
    assert plan_of(optimizer) is first
    assert all(plan_of(optimizer, i) is first for i in range(len(SHAPES)))


def test_who_has_a_gradient_may_change() -> None:
    one, other = new(), new()
    for i in range(4):
        step(one, i, without=i % 2)
        for state in other.state.values():
            state.plan = None
        step(other, i, without=i % 2)
    assert_same(snapshot(one), snapshot(other))


def test_a_state_that_another_parameter_gets() -> None:
    """Of two parameters of one shape each has had a gradient when the other has none."""
    one, other = (optim.AdamW8bit(make_params([(64, 128)] * 3), min_8bit_size=0) for _ in range(2))
    for i in range(4):
        for optimizer in (one, other):
            a, b, _ = params_of(optimizer)
            if i == 2:
                optimizer.state[a], optimizer.state[b] = optimizer.state[b], optimizer.state[a]
            for state in other.state.values():
                state.plan = state._checked = None
            step(optimizer, i, without={0: None, 1: 1, 2: 0, 3: 1}[i])
    assert_same(snapshot(one), snapshot(other))


def test_a_cut_parameter_is_refused_before_anything_is_changed() -> None:
    """Of several calls, the one of the parameter that was cut comes last."""
    dense, gaps = torch.randn(64, 128), torch.zeros(64, 256)[:, ::2].copy_(torch.randn(64, 128))
    params = [torch.nn.Parameter(dense), torch.nn.Parameter(gaps)]
    optimizer = optim.AdamW8bit(params, min_8bit_size=0)
    step(optimizer, 0)
    params[1].data = params[1].data[:32]
    before = copy.deepcopy(snapshot(optimizer))
    give_gradients(params, 1)
    with pytest.raises(ValueError, match=r"exp_avg of parameter 1 .* must be torch.int8 of shape"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)


@pytest.mark.parametrize("edit", [cleared, plain_dicts, loaded], ids=named)
def test_tensors_that_were_replaced_are_freed_at_once(edit: Callable[[optim.AdamW8bit], None]) -> None:
    optimizer = new()
    step(optimizer, 0)
    step(optimizer, 1)
    old = [weakref.ref(x) for state in optimizer.state.values() for x in state.values()]
    gc.disable()
    try:
        edit(optimizer)
        assert not any(ref() is not None for ref in old)
    finally:
        gc.enable()


def test_states_that_are_moved_are_freed_at_once() -> None:
    optimizer = new()
    step(optimizer, 0)
    old = []
    gc.disable()
    try:
        for state in optimizer.state.values():
            for key, x in state.items():
                old.append(weakref.ref(x))
                state[key] = x.clone()
        del x
        assert not any(ref() is not None for ref in old)
    finally:
        gc.enable()


def test_an_optimizer_is_freed_with_its_plan() -> None:
    optimizer = new()
    step(optimizer, 0)
    state = weakref.ref(plan_of(optimizer))
    gc.disable()
    try:
        del optimizer
        assert state() is None
    finally:
        gc.enable()


def test_copies_have_plans_of_their_own() -> None:
    optimizer = new()
    step(optimizer, 0)
    other = copy.deepcopy(optimizer)
    assert plan_of(other) is None
    assert optimizer.state[params_of(optimizer)[0]].format == other.state[params_of(other)[0]].format
    for i in range(2):
        step(optimizer, i)
        step(other, i)
    assert_same(snapshot(optimizer), snapshot(other))


METHODS = {
    "__setitem__": lambda s: s.__setitem__("step", s["step"]),
    "__delitem__": lambda s: s.__delitem__("step"),
    "__ior__": lambda s: s.__ior__({"mine": 1}),
    "update": lambda s: s.update(mine=1),
    "setdefault": lambda s: s.setdefault("mine", 1),
    "pop": lambda s: s.pop("step"),
    "popitem": lambda s: s.popitem(),
    "clear": lambda s: s.clear(),
}


@pytest.mark.parametrize("method", METHODS)
def test_each_way_to_change_entries_ends_the_plan(method: str) -> None:
    optimizer = new()
    step(optimizer, 0)
    state = optimizer.state[params_of(optimizer)[0]]
    assert state.plan is not None
    METHODS[method](state)
    assert state.plan is None
    # Nothing else that dict has changes entries.
    changing = {name for name in dir(dict) if name in METHODS}
    assert changing == {name for name in METHODS if getattr(State, name) is not getattr(dict, name)}


def test_an_op_that_refuses_leaves_everything_as_it_was() -> None:
    optimizer = new()
    step(optimizer, 0)
    before = copy.deepcopy(snapshot(optimizer))
    give_gradients(params_of(optimizer), 1)
    params_of(optimizer)[2].grad = torch.zeros(300).to_sparse()
    with pytest.raises(RuntimeError, match="dense gradients"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)
    step(optimizer, 1)
