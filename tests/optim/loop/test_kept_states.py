"""States that C++ holds from step to step: what users do to tensors in place, and whose memory is freed when."""

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import memkern
from memkern import _ops, optim
from memkern.optim.state import State
from tests.support.helpers import assert_same, give_gradients, make_params, needs_cpp, snapshot

SHAPES = [(64, 128), (40, 128), (300,)]
pytestmark = needs_cpp

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: optim.AdamW8bit(p, min_8bit_size=0),
    "AdamW, fp32": optim.AdamW,
    "AdamW and errors": lambda p: optim.AdamW8bit(p, master_weights="bf16+8", min_8bit_size=0),
    "LAMB": lambda p: optim.LAMB8bit(p, min_8bit_size=0, max_grad_norm=1.0),
    "SGD": lambda p: optim.SGD8bit(p, lr=0.1, momentum=0.9, min_8bit_size=0),
}


def new(build: str = "AdamW", dtype: torch.dtype = torch.float32) -> torch.optim.Optimizer:
    return OPTIMIZERS[build]([torch.nn.Parameter(p.detach().to(dtype)) for p in make_params(SHAPES)])


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def step(optimizer: torch.optim.Optimizer, seed: int) -> None:
    give_gradients(params_of(optimizer), seed)
    optimizer.step()


def kept_of(optimizer: torch.optim.Optimizer) -> Any:
    return optimizer.state[params_of(optimizer)[0]].plan._kept


def numbers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What was stepped with states that C++ holds, as it happens: the number of each step's states."""
    found: list[int] = []
    step_ = _ops.KeptStates.step_

    def noted(self: Any, *args: Any) -> bool:
        found.append(self._number)
        return step_(self, *args)

    monkeypatch.setattr(_ops.KeptStates, "step_", noted)
    return found


@pytest.mark.parametrize("build", OPTIMIZERS)
def test_steps_with_them_have_the_bits_of_the_first(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16 if "errors" in build else torch.float32
    one, other = new(build, dtype), new(build, dtype)
    found = numbers(monkeypatch)
    for i in range(4):
        for optimizer in (one, other):
            optimizer.param_groups[0]["lr"] = 0.01 / (i + 1)
        versions = [p._version for p in params_of(one)]
        step(one, i)
        assert [p._version for p in params_of(one)] == [version + 1 for version in versions]
        assert len(found) == i
        for state in other.state.values():
            state.plan = None
        step(other, i)
    assert len({*found}) == 1, "one plan's states"
    assert_same(snapshot(one), snapshot(other))


def state_in_other_memory(o: torch.optim.Optimizer) -> None:
    for state in o.state.values():
        for x in state.values():
            x.data = x.data.clone()


def memory_of_states_exchanged(o: torch.optim.Optimizer) -> None:
    x = o.state[params_of(o)[0]]["exp_avg"]
    y = torch.full_like(x, 3)
    x.set_(y.untyped_storage(), 0, y.shape, y.stride())


def storage_grown_and_moved(o: torch.optim.Optimizer) -> None:
    x = o.state[params_of(o)[0]]["exp_avg_sq"]
    x.untyped_storage().resize_(1 << 22)


def values_of_params(o: torch.optim.Optimizer) -> None:
    for p in params_of(o):
        p.data = p.data.clone()


def transposed(o: torch.optim.Optimizer) -> None:
    p = params_of(o)[1]
    p.data = p.data.t().contiguous().t()


def bfloat16(o: torch.optim.Optimizer) -> None:
    for p in params_of(o):
        p.grad = None
        p.data = p.data.bfloat16()


def gaps(o: torch.optim.Optimizer) -> None:
    p = params_of(o)[0]
    p.data = torch.zeros(64, 256)[:, ::2].copy_(p.data)


def swapped(o: torch.optim.Optimizer) -> None:
    for p in params_of(o):
        p.grad = None
        torch.utils.swap_tensors(p, torch.nn.Parameter(p.detach() * 2))


EDITS = [
    state_in_other_memory, memory_of_states_exchanged, storage_grown_and_moved, values_of_params, transposed,
    bfloat16, gaps, swapped,
]  # fmt: skip


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_what_is_changed_in_place_is_noticed(edit: Callable[[torch.optim.Optimizer], None]) -> None:
    """Bit for bit the steps of an optimizer whose plans are forgotten before each step."""
    one, other = new(), new()
    for i in range(6):
        for optimizer in (one, other):
            if i in (2, 4):
                edit(optimizer)
            if optimizer is other:
                for state in other.state.values():
                    state.plan = state._checked = None
            step(optimizer, i)
    assert_same(snapshot(one), snapshot(other))


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


def test_bad_gradients_raise_before_anything_is_changed() -> None:
    optimizer = new()
    for i in range(3):
        step(optimizer, i)
    before = copy.deepcopy(snapshot(optimizer))
    give_gradients(params_of(optimizer), 3)
    params_of(optimizer)[2].grad = torch.sparse_coo_tensor([[0]], [1.0], (300,))
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)
    step(optimizer, 4)


class Watching(TorchDispatchMode):
    """Sees the ops that a step calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


def test_another_backend_a_mode_and_trust_bounds_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes the step with all its arguments; after it C++ has the same states."""
    one, other = new("LAMB"), new("LAMB")
    found = numbers(monkeypatch)
    for i in range(8):
        for optimizer in (one, other):
            optimizer.param_groups[0]["trust_bounds"] = (0.5, 0.6) if i in (4, 5) else None
            if i == 4:
                transposed(optimizer)
        with memkern.use_backend("reference" if i == 2 else "cpu"):
            with Watching() if i == 3 else contextlib.nullcontext() as mode:
                step(one, i)
            assert mode is None or "memkern.lamb_step_.default" in mode.seen
            for state in other.state.values():
                state.plan = None
            step(other, i)
        assert_same(snapshot(one), snapshot(other))
    assert [*map(found.index, found)] == [0, 1], "the steps 1 and 7, with a plan for each"


def test_they_are_freed_with_the_plan() -> None:
    optimizer = new()
    for i in range(3):
        step(optimizer, i)
    assert kept_of(optimizer)._ops is not None
    old = [weakref.ref(x) for state in optimizer.state.values() for x in state.values()]
    gc.disable()
    try:
        for p in params_of(optimizer):
            optimizer.state[p] = State()
        assert not any(ref() is not None for ref in old)
        step(optimizer, 0)
        step(optimizer, 1)
        old = [weakref.ref(x) for state in optimizer.state.values() for x in state.values()]
        del optimizer
        assert not any(ref() is not None for ref in old)
    finally:
        gc.enable()


def test_a_number_that_was_forgotten_raises() -> None:
    ops = torch.ops.memkern
    x = [torch.zeros(8)]
    number = ops.keep_states(x, x, [], x, [], [], [0], [0], [128], [])
    assert ops.keep_states(x, x, [], x, [], [], [0], [0], [128], []) == number + 1
    ops.forget_states(number)
    ops.forget_states(number)
    with pytest.raises(RuntimeError, match=f"there are no states of the number {number}"):
        ops.lion_step_kept_(number, x, x, x, [0.0] * 4, None, None, None, 0.0)
    assert ops.lion_step_kept_(number + 1, [x[0].double()], x, x, [0.0] * 4, None, None, None, 0.0) is False
    ops.forget_states(number + 1)


def test_optimizers_in_threads_of_their_own() -> None:
    """One steps while another's plan ends."""
    expected = new()
    for i in range(20):
        step(expected, i)
    found: list[Any] = []

    def train() -> None:
        optimizer = new()
        for i in range(20):
            if i % 5 == 4:
                new_one = new()
                step(new_one, 0)
                step(new_one, 1)
            step(optimizer, i)
        found.append(snapshot(optimizer))

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for each in found:
        assert_same(each, snapshot(expected))


@pytest.mark.parametrize("steps", [1, 3], ids=["given", "kept"])
@pytest.mark.parametrize("build", OPTIMIZERS)
def test_freed_memory_is_an_error(build: str, steps: int) -> None:
    """Storages that are resized to nothing, as FSDP does with weights, are named before anything changes."""
    dtype = torch.bfloat16 if "errors" in build else torch.float32
    optimizer, other = new(build, dtype), new(build, dtype)
    for i in range(steps):
        step(optimizer, i), step(other, i)
    p = params_of(optimizer)[1]
    give_gradients(params_of(optimizer), steps)
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
    step(other, steps)
    assert_same(snapshot(optimizer), snapshot(other))
