"""A step keeps its plan (its op calls) for later steps, until users change states, groups or parameters."""

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memkern
from memkern import optim
from memkern.optim.state import State
from tests.support.helpers import Calls, assert_same, give_gradients, make_params, needs_cpp, snapshot

SHAPES = [(64, 128), (40, 128), (300,)]
# name: what makes the optimizer of some parameters
BUILDERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: optim.AdamW8bit(p, min_8bit_size=0),
    "AdamW, fp32": optim.AdamW,
    "AdamW and errors": lambda p: optim.AdamW8bit(p, master_weights="bf16+8", min_8bit_size=0),
    "LAMB": lambda p: optim.LAMB8bit(p, min_8bit_size=0, max_grad_norm=1.0),
    "SGD": lambda p: optim.SGD8bit(p, lr=0.1, momentum=0.9, min_8bit_size=0),
}


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


# ---- edits that users make between two steps


def replaced_entry(o: optim.AdamW8bit) -> None:
    state = o.state[params_of(o)[1]]
    state["exp_avg"] = state["exp_avg"].clone()


def reset_by_entry(o: optim.AdamW8bit) -> None:
    state = o.state[params_of(o)[1]]
    state.update({key: torch.zeros_like(x) for key, x in state.items()})


def moved(o: optim.AdamW8bit) -> None:
    for state in o.state.values():
        for key, x in state.items():
            state[key] = x.clone()


def cleared(o: optim.AdamW8bit) -> None:
    o.state.clear()


def one_state_deleted(o: optim.AdamW8bit) -> None:
    del o.state[params_of(o)[0]]


def plain_dicts(o: optim.AdamW8bit) -> None:
    for p in params_of(o):
        o.state[p] = {key: x.clone() for key, x in o.state[p].items()}


def without_format(o: optim.AdamW8bit) -> None:
    """Replaces the states by copies that know no Format, as Lightning does when it moves states."""
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


def channels_last(o: optim.AdamW8bit) -> None:
    p = params_of(o)[0]
    p.data = p.data.t().contiguous().t()


def half(o: optim.AdamW8bit) -> None:
    for p in params_of(o):
        p.data = p.data.bfloat16()
        p.grad = None


def stochastic(o: optim.AdamW8bit) -> None:
    """Casts weights to bf16; the second call turns on stochastic_rounding, which leaves no trace in a state."""
    o.param_groups[0]["stochastic_rounding"] = params_of(o)[0].dtype == torch.bfloat16
    half(o)


def loaded(o: optim.AdamW8bit) -> None:
    o.load_state_dict(copy.deepcopy(o.state_dict()))


def state_in_other_memory(o: optim.AdamW8bit) -> None:
    for state in o.state.values():
        for x in state.values():
            x.data = x.data.clone()


def memory_of_states_exchanged(o: optim.AdamW8bit) -> None:
    x = o.state[params_of(o)[0]]["exp_avg"]
    y = torch.full_like(x, 3)
    x.set_(y.untyped_storage(), 0, y.shape, y.stride())


def storage_grown_and_moved(o: optim.AdamW8bit) -> None:
    o.state[params_of(o)[0]]["exp_avg_sq"].untyped_storage().resize_(1 << 22)


def weights_in_other_memory(o: optim.AdamW8bit) -> None:
    for p in params_of(o):
        p.data = p.data.clone()


def gaps(o: optim.AdamW8bit) -> None:
    p = params_of(o)[0]
    p.data = torch.zeros(64, 256)[:, ::2].copy_(p.data)


def other_tensors(o: optim.AdamW8bit) -> None:
    for p in params_of(o):
        p.grad = None
        torch.utils.swap_tensors(p, torch.nn.Parameter(p.detach() * 2))


def option(name: str, value: Any) -> Callable[[optim.AdamW8bit], None]:
    def edit(o: optim.AdamW8bit) -> None:
        for group in o.param_groups:
            group[name] = value

    edit.__name__ = f"{name} {value}"
    return edit


OPTIONS = {
    "block_size": 64, "codec": "dynamic", "state_bits": 32, "min_8bit_size": 10**6, "max_grad_norm": 0.1,
    "weight_decay": 0.1,
}  # fmt: skip
EDITS = [
    replaced_entry, reset_by_entry, cleared, one_state_deleted, plain_dicts, without_format, swapped, other_group,
    other_order, channels_last, half, stochastic, loaded, state_in_other_memory, memory_of_states_exchanged,
    storage_grown_and_moved, weights_in_other_memory, gaps, other_tensors, copy.deepcopy,
    *(option(name, value) for name, value in OPTIONS.items()),
]  # fmt: skip


def name_of(edit: Callable[..., Any]) -> str:
    return edit.__name__


# ---- plans


@pytest.mark.parametrize("edit", EDITS, ids=name_of)
def test_a_step_after_an_edit_is_that_of_a_new_plan(edit: Callable[[optim.AdamW8bit], Any]) -> None:
    """The edited optimizer has the bits of an optimizer whose plans are dropped before each step."""
    planned, replanned = new(), new()
    for i in range(6):
        if i in (2, 4):
            # An edit changes the optimizer in place and returns None, or returns a copy.
            planned, replanned = edit(planned) or planned, edit(replanned) or replanned
        for state in replanned.state.values():
            if isinstance(state, State):
                state.plan = state._layout = None
        step(planned, i)
        step(replanned, i)
    assert_same(snapshot(planned), snapshot(replanned))


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


def test_a_step_after_two_states_are_exchanged_is_that_of_a_new_plan() -> None:
    """All parameters have one shape. After the exchange a step lacks the first one's gradient, and one the second's."""
    planned, replanned = (optim.AdamW8bit(make_params([(64, 128)] * 3), min_8bit_size=0) for _ in range(2))
    for i in range(4):
        for optimizer in (planned, replanned):
            a, b, _ = params_of(optimizer)
            if i == 2:
                optimizer.state[a], optimizer.state[b] = optimizer.state[b], optimizer.state[a]
            for state in replanned.state.values():
                state.plan = state._layout = None
            step(optimizer, i, without=(None, 1, 0, 1)[i])
    assert_same(snapshot(planned), snapshot(replanned))


def test_a_cut_parameter_is_refused_before_anything_is_changed() -> None:
    """A step makes several calls of ops, of which the call with the cut parameter would be the last."""
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


@pytest.mark.parametrize("edit", [moved, cleared, plain_dicts, loaded], ids=name_of)
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


def test_an_optimizer_is_freed_with_its_plan() -> None:
    optimizer = new()
    step(optimizer, 0)
    plan = weakref.ref(plan_of(optimizer))
    gc.disable()
    try:
        del optimizer
        assert plan() is None
    finally:
        gc.enable()


# The methods of a dict that change its entries: a call of each.
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
    assert state.plan is state._layout is None
    # State overrides all of these methods that dict has.
    in_dict = {name for name in dir(dict) if name in METHODS}
    assert in_dict == {name for name in METHODS if getattr(State, name) is not getattr(dict, name)}


@pytest.mark.parametrize("change", ["resize_", "transpose", "dtype"])
def test_a_state_that_does_not_fit_any_more_raises(change: str) -> None:
    optimizer = new()
    for i in range(2):
        step(optimizer, i)
    x = optimizer.state[params_of(optimizer)[0]]["exp_avg"]
    if change == "resize_":
        x.resize_(3, 128)
    elif change == "transpose":
        x.t_()
    else:
        x.data = x.data.to(torch.int16)
    before = copy.deepcopy(snapshot(optimizer))
    with pytest.raises(RuntimeError, match="exp_avg"):
        step(optimizer, 2)
    assert_same(snapshot(optimizer), before)


@needs_cpp
def test_steps_with_another_backend_mode_or_trust_bounds_are_those_of_new_plans() -> None:
    """Step 2 is on the reference, step 3 under a dispatch mode; steps 4 and 5 have trust_bounds."""
    planned, replanned = (BUILDERS["LAMB"](make_params(SHAPES)) for _ in range(2))
    for i in range(8):
        for optimizer in (planned, replanned):
            optimizer.param_groups[0]["trust_bounds"] = (0.5, 0.6) if i in (4, 5) else None
        versions = [p._version for p in params_of(planned)]
        with memkern.use_backend("reference" if i == 2 else "cpu"):
            with Calls() if i == 3 else contextlib.nullcontext() as mode:
                step(planned, i)
            assert mode is None or "memkern::lamb_step_" in mode.names
            for state in replanned.state.values():
                state.plan = None
            step(replanned, i)
        assert all(p._version > version for p, version in zip(params_of(planned), versions, strict=True))
        assert_same(snapshot(planned), snapshot(replanned))


def test_optimizers_in_several_threads_step_as_in_one() -> None:
    """In each thread one optimizer steps, and others are made, stepped once and freed."""
    expected = new()
    for i in range(20):
        step(expected, i)
    snapshots: list[Any] = []

    def train() -> None:
        optimizer = new()
        for i in range(20):
            if i % 5 == 4:
                step(new(), 0)
            step(optimizer, i)
        snapshots.append(snapshot(optimizer))

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same(snapshots, [snapshot(expected)] * 4)


@needs_cpp
@pytest.mark.parametrize("build", BUILDERS)
def test_a_tensor_whose_memory_was_freed_raises(build: str) -> None:
    """FSDP resizes storages of weights to 0. A step with such a tensor raises before anything changes."""
    dtype = torch.bfloat16 if "errors" in build else torch.float32
    optimizer, undisturbed = (
        BUILDERS[build]([torch.nn.Parameter(p.detach().to(dtype)) for p in make_params(SHAPES)]) for _ in range(2)
    )
    for i in range(2):
        step(optimizer, i), step(undisturbed, i)
    p = params_of(optimizer)[1]
    give_gradients(params_of(optimizer), 2)
    tensors = [p, p.grad, *(x for x in optimizer.state[p].values() if isinstance(x, torch.Tensor))]
    for x in tensors:
        assert x is not None
        values, storage = x.detach().clone(), x.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        with pytest.raises(RuntimeError, match="has no memory: its storage has been freed"):
            optimizer.step()
        storage.resize_(size)
        with torch.no_grad():
            x.copy_(values)
    optimizer.step()
    step(undisturbed, 2)
    assert_same(snapshot(optimizer), snapshot(undisturbed))
