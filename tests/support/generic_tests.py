"""torch's generic tests of optimizers (its test/test_optim.py, testing/_internal/common_optimizers.py) on memkern's.

Each test has a fixture ``new``, which builds an optimizer with the options of a case, or ``plain``, which builds one of
each class. They are collected for the classes (tests/optim/generic/test_generic.py) and for wrapped ones
(test_generic_wrapped.py).
"""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

from tests.support.generic_optimizers import (
    assert_right_direction,
    clones,
    closure_of,
    linear,
    named,
    saved_and_loaded,
)
from tests.support.helpers import assert_same, name_of, snapshot
from tests.support.optimizers import Options

# ---- steps


def test_goes_in_the_right_direction(new: Any) -> None:
    weight, bias, x = linear()
    optimizer = new([weight, bias])
    closure = closure_of(optimizer, weight, bias, x)
    assert_right_direction(optimizer, closure, up=optimizer.param_groups[0]["maximize"])


@pytest.mark.parametrize(("shape", "dtype"), [((), torch.float64), ((1,), torch.float32), ((1, 1), torch.float64)])
def test_a_tensor_lr_is_its_number(plain: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Also for each value that is written into the tensor between steps."""
    weight, bias, x = linear()
    ours = clones(weight, bias)
    reference, optimizer = plain([weight, bias], lr=0.0), plain(ours, lr=torch.zeros(shape, dtype=dtype))
    for rate in (1e-2, 5e-3, 0.0, 2e-2):
        lr = optimizer.param_groups[0]["lr"].fill_(rate)
        reference.param_groups[0]["lr"] = float(lr)  # the number that the dtype can hold
        reference.step(closure_of(reference, weight, bias, x))
        optimizer.step(closure_of(optimizer, *ours, x))
    assert_same(snapshot(optimizer), snapshot(reference))


def test_groups_differ_in_their_options(new: Any) -> None:
    weight, bias, x = linear()
    irrelevant = Parameter(torch.randn(2))
    before = irrelevant.detach().clone()
    options = copy.deepcopy(new.options)
    lr = options.pop("lr", 1e-3)
    for key in ("max_grad_norm", "foreach", "fused"):  # the whole optimizer's
        options.pop(key, None)
    optimizer = new.build(
        [
            {"params": [weight], "lr": lr, **options},
            {"params": [bias], "lr": lr, **options, "weight_decay": 0.0},
            {"params": [irrelevant]},
        ],
        lr=1e-28,
    )
    closure = closure_of(optimizer, weight, bias, x)

    def with_irrelevant() -> Tensor:
        loss = closure()
        irrelevant.grad = torch.rand_like(irrelevant)
        return loss

    with_irrelevant.loss_of = closure.loss_of
    assert_right_direction(optimizer, with_irrelevant, up=options.get("maximize", False))
    assert torch.equal(irrelevant, before)


def test_nothing_happens_without_gradients(plain: Any) -> None:
    params = [torch.randn(2, 3, requires_grad=False) for _ in range(2)]
    before = [p.clone() for p in params]
    optimizer = plain(params)
    for _ in range(2):
        assert optimizer.step(lambda: torch.tensor([1.0])) == 1.0
    assert_same(params, before)
    assert not optimizer.state


def test_nothing_happens_for_gradients_of_zero(new: Any) -> None:
    param = torch.randn((5, 1), requires_grad=True)
    before = param.detach().clone()
    optimizer = new([param], weight_decay=0.0)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(param, before)


def test_a_gradient_comes_later(new: Any) -> None:
    """One parameter has none in the first step and none in the third."""
    params = [Parameter(torch.randn(10, 5)), Parameter(torch.randn(10))]
    optimizer = new(params)
    for with_gradients in ((0,), (0, 1), (1,)):
        before = [p.detach().clone() for p in params]
        for i, p in enumerate(params):
            p.grad = torch.randn_like(p) if i in with_gradients else None
        optimizer.step()
        for i, p in enumerate(params):
            assert torch.equal(p, before[i]) == (i not in with_gradients)


def test_a_closure_runs_once_with_gradients(plain: Any) -> None:
    weight, bias, x = linear()
    optimizer, calls = plain([weight, bias]), []
    closure = closure_of(optimizer, weight, bias, x)

    def counted() -> Tensor:
        calls.append(torch.is_grad_enabled())
        return closure()

    with torch.no_grad():
        expected = (weight.mv(x) + bias).pow(2).sum()
        loss = optimizer.step(counted)
    assert calls == [True]
    torch.testing.assert_close(loss.detach(), expected)


def test_a_step_takes_no_memory_after_the_first(new: Any) -> None:
    """torch's test of peak memory without intermediates; amsgrad, which has no kernel, is left out."""
    params = [Parameter(torch.rand(16, 8)) for _ in range(10)]
    optimizer = new(params)
    for p in params:
        p.grad = torch.rand_like(p)
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        optimizer.step()
    allocated_bytes = sum(max(event.self_cpu_memory_usage, 0) for event in profiled.events())
    group = optimizer.param_groups[0]
    max_bytes = 64  # for the step sizes of a group with bias correction
    if group.get("trust_bounds") is not None:
        max_bytes += 16 * len(params)  # two sums of squares of each
    assert allocated_bytes <= max_bytes or group.get("amsgrad")


def test_parameters_of_many_dtypes_step_as_alone(plain: Any) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    options = {"state_bits": 32, "max_grad_norm": None}
    together = [Parameter(torch.randn(10, 5).to(dtype)) for dtype in dtypes for _ in range(2)]
    separate = clones(*together)
    optimizer, optimizers = plain(together, **options), [plain([p], **options) for p in separate]
    for _ in range(3):
        for p, q in zip(together, separate, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for o in (optimizer, *optimizers):
            o.step()
    assert_same(together, separate)


# ---- state dicts

NAMES = [(False, True), (True, False), (True, True)]  # whether the saved, and the loaded run has names


def test_state_dicts_repeat_a_run(new: Any) -> None:
    assert_repeats(new, (False, False))


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_state_dicts_repeat_a_run_whoever_has_names(plain: Any, names: tuple[bool, bool]) -> None:
    assert_repeats(plain, names)


def assert_repeats(new: Any, names: tuple[bool, bool]) -> None:
    """Asserts that a run loaded from a state dict steps as the saved one; ``names``: as in NAMES."""
    weight, bias, x = linear()
    optimizer = new(named([weight, bias], names[0]))
    for _ in range(4):
        optimizer.step(closure_of(optimizer, weight, bias, x))
    copies = clones(weight, bias)
    other = new(named(copies, names[1]))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(4):
        optimizer.step(closure_of(optimizer, weight, bias, x))
        other.step(closure_of(other, *copies, x))
        assert_same(snapshot(other), snapshot(optimizer))

    def without_names(state_dict: Options) -> Options:
        groups = state_dict["param_groups"]
        return {**state_dict, "param_groups": [{k: v for k, v in g.items() if k != "param_names"} for g in groups]}

    assert_same(without_names(other.state_dict()), without_names(optimizer.state_dict()))
    if any(names):
        assert other.state_dict()["param_groups"][0]["param_names"] == ["name0", "name1"]
    other.param_groups.extend(other.param_groups)  # repeated parameters are numbered alike
    assert_same(
        without_names(other.state_dict())["param_groups"][-1],
        without_names(optimizer.state_dict())["param_groups"][-1],
    )


def primed(new: Any, steps: int = 3) -> tuple[torch.optim.Optimizer, Callable[[], Tensor]]:
    """An optimizer after some steps, and the closure of its next one."""
    weight, bias, x = linear()
    optimizer = new([weight, bias])
    closure = closure_of(optimizer, weight, bias, x)
    for _ in range(steps):
        optimizer.step(closure)
    return optimizer, closure


@pytest.mark.parametrize("kind", [float, int, torch.tensor, torch.DoubleTensor], ids=name_of)
def test_a_step_that_is_a_number_loads(plain: Any, kind: Any) -> None:
    """As in checkpoints of older versions of torch."""
    optimizer, closure = primed(plain)
    state_dict = copy.deepcopy(optimizer.state_dict())
    for state in state_dict["state"].values():
        if "step" in state:
            step = state["step"].item()
            state["step"] = torch.tensor(step, dtype=torch.float64) if kind is torch.DoubleTensor else kind(int(step))
    optimizer.load_state_dict(state_dict)
    optimizer.step(closure)
    for state in optimizer.state.values():
        if "step" in state:
            assert_same(state["step"], torch.tensor(4.0))


def test_loading_leaves_the_state_dict_alone(plain: Any) -> None:
    optimizer, closure = primed(plain)
    state_dict = optimizer.state_dict()
    before = copy.deepcopy(state_dict)
    other = plain(clones(*optimizer.param_groups[0]["params"]))
    other.load_state_dict(state_dict)
    for p in other.param_groups[0]["params"]:
        p.grad = torch.randn_like(p)
    other.step()
    assert_same(state_dict, before)
    optimizer.step(closure)


def test_a_state_dict_loads_for_parameters_of_another_dtype(plain: Any) -> None:
    """A run goes on from a checkpoint of fp32 parameters in bf16, and from one of these in fp32 again."""
    optimizer, _ = primed(plain)
    for dtype in (torch.bfloat16, torch.float32):
        params = [Parameter(p.detach().to(dtype)) for p in optimizer.param_groups[0]["params"]]
        other = plain(params)
        other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
        # HostOffload has errors of bf16 parameters beside their moments.
        states = [
            [{key: x for key, x in state.items() if key != "weight_error"} for state in snapshot(o)["states"]]
            for o in (other, optimizer)
        ]
        assert_same(*states)
        for p in params:
            p.grad = torch.randn_like(p)
        other.step()
        optimizer = other


def test_state_dict_hooks_change_what_is_saved(plain: Any) -> None:
    optimizer, _ = primed(plain, 1)

    def before(o: torch.optim.Optimizer) -> None:
        o.state["test"] = 1

    def after(o: torch.optim.Optimizer, state_dict: Options) -> Options:
        return {**state_dict, "ran": state_dict["state"].pop("test", None)}

    handle = optimizer.register_state_dict_post_hook(after)
    assert optimizer.state_dict()["ran"] is None
    handle.remove()
    optimizer.register_state_dict_pre_hook(before)
    state_dict = optimizer.state_dict()
    assert state_dict["state"]["test"] == 1
    optimizer.load_state_dict(state_dict)  # entries that belong to no parameter come along
    assert optimizer.state["test"] == 1
    optimizer.register_state_dict_post_hook(after)
    assert optimizer.state_dict()["ran"] == 1


def test_load_state_dict_hooks_change_what_is_loaded(plain: Any) -> None:
    optimizer, _ = primed(plain, 1)
    state_dict = optimizer.state_dict()
    state_dict["theirs"] = state_dict.pop("state")

    def change_in_place(_: torch.optim.Optimizer, loaded: Options) -> None:
        loaded["state"] = loaded.pop("theirs")
        loaded["param_groups"][0]["lr"] = 0.002

    def return_another(_: torch.optim.Optimizer, loaded: Options) -> Options:
        loaded = copy.deepcopy(loaded)
        loaded["param_groups"][0]["lr"] = 0.003
        return loaded

    def after(o: torch.optim.Optimizer) -> None:
        o.state["lr after"] = float(o.param_groups[0]["lr"])

    optimizer.register_load_state_dict_pre_hook(change_in_place)
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["lr"] == 0.002
    optimizer.register_load_state_dict_pre_hook(return_another, prepend=True)
    optimizer.register_load_state_dict_post_hook(after)
    optimizer.load_state_dict(state_dict)
    assert optimizer.state["lr after"] == 0.002
    optimizer.register_load_state_dict_pre_hook(return_another)
    optimizer.load_state_dict(state_dict)
    assert optimizer.state["lr after"] == 0.003


def test_step_hooks_fire_in_order(plain: Any) -> None:
    optimizer, _ = primed(plain, 1)
    sgd, calls = torch.optim.SGD([torch.ones(1)]), []
    note: Callable[[Any], Callable[..., None]] = lambda x: lambda *args: calls.append(x)  # noqa: E731
    handles = [
        register_optimizer_step_pre_hook(note("global before")),
        register_optimizer_step_post_hook(note("global after")),
    ]
    for o in (optimizer, sgd):
        handles += [o.register_step_pre_hook(note("before")), o.register_step_post_hook(note("after"))]
    expected = ["global before", "before", "after", "global after"]
    for o in (optimizer, sgd, optimizer):
        o.step()
    assert calls == 3 * expected
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert calls == 3 * expected


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_have_all_attributes_and_step_alike(plain: Any, clone: Callable[[Any], Any]) -> None:
    optimizer, _ = primed(plain)

    def public(o: object) -> Iterator[str]:
        return (key for key in vars(o) if not key.startswith("_"))

    other = clone(optimizer)
    assert {*public(other)} == {*public(optimizer)}
    assert_same(other.state_dict(), optimizer.state_dict())
    for o in (optimizer, other):
        for p in o.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        o.step()
    assert_same(snapshot(other), snapshot(optimizer))


def test_repr_has_the_class_and_its_options(plain: Any) -> None:
    optimizer, _ = primed(plain, 0)
    assert repr(optimizer).startswith(f"{type(optimizer).__name__} (")
    assert "lr:" in repr(optimizer)


def test_groups_have_every_option(plain: Any) -> None:
    optimizer, _ = primed(plain, 0)
    optimizer.add_param_group({"params": [torch.ones(3, requires_grad=True)], "weight_decay": 0.25})
    for group in optimizer.param_groups:
        assert {*optimizer.defaults} <= {*group}
    assert optimizer.param_groups[1]["weight_decay"] == 0.25
    assert optimizer.param_groups[1]["lr"] == optimizer.param_groups[0]["lr"]
