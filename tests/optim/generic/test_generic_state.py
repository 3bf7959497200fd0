"""What PyTorch asks of its own optimizers, of ours: state dicts, hooks, copies, errors."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.support.generic_optimizers import Options, clones, closure_of, linear, named, saved
from tests.support.helpers import assert_same, name_of, over_optimizers, snapshot

NAMES = [(False, False), (False, True), (True, False), (True, True)]


def test_state_dicts_repeat_a_run(new: Any) -> None:
    assert_repeats(new, (False, False))


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_state_dicts_repeat_a_run_whoever_has_names(plain: Any, names: tuple[bool, bool]) -> None:
    assert_repeats(plain, names)


def assert_repeats(new: Any, names: tuple[bool, bool]) -> None:
    weight, bias, x = linear()
    optimizer = new(named([weight, bias], names[0]))
    for _ in range(4):
        optimizer.step(closure_of(optimizer, weight, bias, x))
    again = clones(weight, bias)
    other = new(named(again, names[1]))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(4):
        optimizer.step(closure_of(optimizer, weight, bias, x))
        other.step(closure_of(other, *again, x))
        assert_same(snapshot(other), snapshot(optimizer))

    def without_names(state_dict: Options) -> Options:
        return {
            **state_dict,
            "param_groups": [
                {k: v for k, v in group.items() if k != "param_names"} for group in state_dict["param_groups"]
            ],
        }

    assert_same(without_names(other.state_dict()), without_names(optimizer.state_dict()))
    if any(names):
        assert other.state_dict()["param_groups"][0]["param_names"] == ["name0", "name1"]
    other.param_groups.extend(other.param_groups)  # repeated parameters are numbered alike
    assert_same(
        without_names(other.state_dict())["param_groups"][-1],
        without_names(optimizer.state_dict())["param_groups"][-1],
    )


def primed(new: Any, steps: int = 3) -> tuple[torch.optim.Optimizer, Callable[[], Tensor]]:
    weight, bias, x = linear()
    optimizer = new([weight, bias])
    closure = closure_of(optimizer, weight, bias, x)
    for _ in range(steps):
        optimizer.step(closure)
    return optimizer, closure


def test_state_dicts_load_with_weights_only(plain: Any) -> None:
    optimizer, _ = primed(plain)
    assert_same(saved(optimizer.state_dict()), optimizer.state_dict())


@pytest.mark.parametrize("kind", [float, int, torch.tensor, torch.DoubleTensor], ids=name_of)
def test_a_step_that_is_a_number_loads(plain: Any, kind: Any) -> None:
    optimizer, closure = primed(plain)
    older = copy.deepcopy(optimizer.state_dict())
    for state in older["state"].values():
        if "step" in state:
            step = state["step"].item()
            state["step"] = (
                torch.tensor(step, dtype=torch.float64) if kind is torch.DoubleTensor else kind(int(step))
            )
    optimizer.load_state_dict(older)
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


def test_a_state_dict_of_another_dtype(plain: Any) -> None:
    """As where a checkpoint of fp32 training goes on in bf16, and one of that in fp32 again."""
    optimizer, _ = primed(plain)
    for dtype in (torch.bfloat16, torch.float32):
        params = [Parameter(p.detach().to(dtype)) for p in optimizer.param_groups[0]["params"]]
        other = plain(params)
        other.load_state_dict(saved(optimizer.state_dict()))
        # HostOffload has fp32 copies of bf16 parameters beside their moments.
        states = [
            [
                {key: x for key, x in state.items() if key != "master_weight"}
                for state in snapshot(o)["states"]
            ]
            for o in (other, optimizer)
        ]
        assert_same(*states)
        for p in params:
            p.grad = torch.randn_like(p)
        other.step()
        optimizer = other


# ---- hooks


def test_state_dict_hooks(plain: Any) -> None:
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


def test_load_state_dict_hooks(plain: Any) -> None:
    optimizer, _ = primed(plain, 1)
    state_dict = optimizer.state_dict()

    def in_place(_: torch.optim.Optimizer, given: Options) -> None:
        given["param_groups"][0]["lr"] = 0.002

    def returned(_: torch.optim.Optimizer, given: Options) -> Options:
        given = copy.deepcopy(given)
        given["param_groups"][0]["lr"] = 0.003
        return given

    def after(o: torch.optim.Optimizer) -> None:
        o.state["lr after"] = float(o.param_groups[0]["lr"])

    optimizer.register_load_state_dict_pre_hook(in_place)
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["lr"] == 0.002
    optimizer.register_load_state_dict_pre_hook(returned, prepend=True)
    optimizer.register_load_state_dict_post_hook(after)
    optimizer.load_state_dict(state_dict)
    assert optimizer.state["lr after"] == 0.002
    optimizer.register_load_state_dict_pre_hook(returned)
    optimizer.load_state_dict(state_dict)
    assert optimizer.state["lr after"] == 0.003


def test_step_hooks_fire_in_order(plain: Any) -> None:
    optimizer, _ = primed(plain, 1)
    sgd, seen = torch.optim.SGD([torch.ones(1)]), []
    note: Callable[[Any], Callable[..., None]] = lambda x: lambda *args: seen.append(x)  # noqa: E731
    handles = [
        register_optimizer_step_pre_hook(note("global before")),
        register_optimizer_step_post_hook(note("global after")),
    ]
    for each in (optimizer, sgd):
        handles += [
            each.register_step_pre_hook(note("before")),
            each.register_step_post_hook(note("after")),
        ]
    expected = ["global before", "before", "after", "global after"]
    for each in (optimizer, sgd, optimizer):
        each.step()
    assert seen == 3 * expected
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert seen == 3 * expected


# ---- objects


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
def test_copies_have_everything(plain: Any, way: Callable[[Any], Any]) -> None:
    optimizer, _ = primed(plain)

    def public(o: object) -> Iterator[str]:
        return (key for key in vars(o) if not key.startswith("_"))

    other = way(optimizer)
    assert {*public(other)} == {*public(optimizer)}
    assert_same(other.state_dict(), optimizer.state_dict())
    for each in (optimizer, other):
        for p in each.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        each.step()
    assert_same(snapshot(other), snapshot(optimizer))


def test_can_be_printed(plain: Any) -> None:
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


# ---- errors of torch's own

a, b = (Parameter(torch.randn(1, 1)) for _ in range(2))
ERRORS: dict[str, tuple[Any, Options, type[Exception], str]] = {
    "one tensor": (a, {}, TypeError, "should be an iterable of Tensors or dicts"),
    "none": ([], {}, ValueError, "empty parameter list"),
    "in two groups": ([{"params": a}, {"params": a}], {}, ValueError, "more than one parameter group"),
    "no tensor": ([1], {}, TypeError, "optimizer can only optimize Tensors"),
    "no leaf": ([a * 2], {}, ValueError, "can't optimize a non-leaf Tensor"),
    "two rates": ([a], {"lr": torch.tensor([0.001, 0.001])}, ValueError, "lr must be a float or a 0-dim tensor"),
    "a name missing": ([("weight", a), b], {}, ValueError, "Some param names are missing"),
    "a group's names missing": (
        [{"params": [a]}, {"params": [("weight", b)]}], {}, ValueError, "with/without names"
    ),
    "differentiable": ([a], {"differentiable": True}, ValueError, "does not support differentiable"),
}  # fmt: skip


@over_optimizers
@pytest.mark.parametrize("name", ERRORS)
def test_errors(build: type, name: str) -> None:
    params, options, error, message = ERRORS[name]
    with pytest.raises(error, match=f"(?i){message}"):
        build(params, **options)


@over_optimizers
def test_a_parameter_twice_in_a_group_warns(build: type) -> None:
    with pytest.warns(UserWarning, match="a parameter group with duplicate parameters"):
        build([a, a])
