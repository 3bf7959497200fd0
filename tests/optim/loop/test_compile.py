"""A step under torch.compile(fullgraph=True) has the bits of eager mode, and is not recompiled at each call."""

import shutil
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

import memkern
from memkern import optim
from tests.support.helpers import (
    assert_same,
    first_quick,
    give_gradients,
    hard,
    like,
    make_params,
    name_of,
    needs_cpp,
    snapshot,
)
from tests.support.training_edits import STORAGE

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def graph_count() -> int:
    return counters["stats"]["unique_graphs"]


def compiled(optimizer: torch.optim.Optimizer, backend: str = "aot_eager") -> Callable[..., Any]:
    return torch.compile(optimizer.step, fullgraph=True, backend=backend)


# name: the first lr, the lr of each step, the number of graphs compiled
RATES = {
    "changing float": (lambda: 1e-2, [1e-2, 9e-3, 5e-3, 1e-4, 3e-2], 2),
    "changing fp32 tensor": (lambda: torch.tensor(1e-2), [1e-2, 9e-3, 5e-3, 0.0, 3e-2], 1),
    "warm-up from 0": (lambda: 0.0, [0.0, 1e-3, 2e-3, 1.0, 0.0], 2),
}
OTHER_CLASSES = [optim.LAMB8bit, optim.Lion, optim.SGD8bit]


def run(build: type, rates: str, wrap: Callable[[Any], Callable[..., Any]], **options: Any) -> Any:
    """A snapshot after a step with each lr of RATES[rates]. wrap: takes the optimizer, returns what takes a step."""
    make_lr, values, _ = RATES[rates]
    params = make_params()
    optimizer = build(params, lr=make_lr(), **options)
    step = wrap(optimizer)
    for seed, value in enumerate(values):
        group = optimizer.param_groups[0]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value
        give_gradients(params, seed)  # new tensors, as zero_grad() and backward() make them
        step()
    return snapshot(optimizer)


@pytest.mark.parametrize(
    ("build", "rates"),
    [
        *first_quick(((optim.AdamW8bit, rates) for rates in RATES), 2),
        *(pytest.param(build, "changing float", marks=pytest.mark.full) for build in OTHER_CLASSES),
    ],
    ids=name_of,
)
def test_a_changing_lr_compiles_few_graphs_and_changes_no_bit(build: type, rates: str) -> None:
    expected = run(build, rates, lambda o: o.step)
    actual = run(build, rates, compiled)
    assert 1 <= graph_count() <= RATES[rates][2]
    assert_same(actual, expected)


@pytest.mark.parametrize("edit", ["transposed", "gaps", "offset"])
def test_a_step_compiled_after_a_layout_changed_has_the_bits_of_eager_mode(edit: str) -> None:
    def train(compiles: bool) -> Any:
        params = make_params()
        optimizer = optim.AdamW8bit(params)
        step, snapshots = optimizer.step, []
        for seed in range(4):
            if seed == 2:
                STORAGE[edit](params[0])
                step = torch.compile(optimizer.step, backend="aot_eager") if compiles else step
            give_gradients(params, seed)
            step()
            snapshots.append(snapshot(optimizer))
        return snapshots

    assert_same(train(True), train(False))


@pytest.mark.parametrize(
    ("build", "options", "edit"),
    first_quick([(optim.AdamW8bit, {}, "gaps"), (optim.LARS, {}, "fp64"), (optim.AdamW, {"amsgrad": True}, None)]),
)
def test_first_step_of_several_groups_is_compiled(build: type, options: dict[str, Any], edit: str | None) -> None:
    """The first step makes the states. With gaps, fp64 or amsgrad it takes several ops, each with its own states."""

    def train(compiles: bool) -> Any:
        params, group_options = make_params(), options
        if edit == "fp64":
            params = [torch.nn.Parameter(p.detach().double()) for p in params]
            group_options = options | {"state_bits": 32}
        optimizer = build([{"params": [p]} for p in params], **group_options)
        step = compiled(optimizer) if compiles else optimizer.step
        if edit == "gaps":
            STORAGE[edit](params[0])
        for seed in range(2):
            give_gradients(params, seed)
            step()
        return snapshot(optimizer)

    assert_same(train(True), train(False))


def test_a_layout_that_changes_after_compilation_raises() -> None:
    """TorchDynamo does not guard the layouts of an optimizer's parameters. The op refuses, and changes nothing."""
    params = make_params()
    optimizer = optim.AdamW8bit(params)
    step = compiled(optimizer)
    for seed in range(2):
        give_gradients(params, seed)
        step()
    STORAGE["transposed"](params[0])
    give_gradients(params, 2)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="must have its parameter's shape and strides"):
        step()
    assert_same(snapshot(optimizer), before)
    # Neither a step of eager mode nor one that is compiled anew raises.
    optimizer.step()
    torch._dynamo.reset()
    compiled(optimizer)()


def scale_gradients(optimizer: Any, number: int) -> None:
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0**number), torch.tensor(float(number == 2))


def set_rates(optimizer: Any, number: int) -> None:
    for i, group in enumerate(optimizer.param_groups):
        group["lr"] = 1e-2 * (i + 1) * 0.9**number


def drop_gradient(optimizer: Any, number: int) -> None:
    if number == 2:
        optimizer.param_groups[1]["params"][0].grad = None


def load_state(optimizer: Any, number: int) -> None:
    if number == 2:
        optimizer.load_state_dict(optimizer.state_dict())


def use_channels_last(optimizer: Any, number: int) -> None:
    """Makes a parameter channels_last before the first step, and gives it contiguous gradients."""
    p = optimizer.param_groups[-1]["params"][0]
    if number == 0:
        p.data = hard((8, 16, 6, 6), 0).contiguous(memory_format=torch.channels_last)
    p.grad = hard((8, 16, 6, 6), number)


def use_bf16_weights(optimizer: Any, number: int) -> None:
    """Makes weights bf16 with ``master_weights`` before step 0, and about half of their elements 0 before step 2."""
    for i, group in enumerate(optimizer.param_groups):
        (p,) = group["params"]
        p.grad = None  # an fp32 one, from give_gradients
        if number == 0:
            p.data, group["master_weights"] = p.data.bfloat16(), "bf16+8"
        if number == 2:
            p.data.mul_(hard(p.shape, i) > 0)
        p.grad = like(p, 1000 * number + i)


@pytest.mark.parametrize(
    ("build", "change", "max_graphs"),  # change: called before each step with the optimizer and the step's number
    [
        (optim.AdamW8bit, scale_gradients, 1),
        (optim.AdamW8bit, set_rates, 2),
        (optim.AdamW8bit, drop_gradient, 2),
        (optim.AdamW8bit, load_state, 2),  # loading replaces the states' tensors
        (optim.AdamW8bit, use_channels_last, 1),
        (optim.AdamW8bit, use_bf16_weights, 1),
        *(pytest.param(build, scale_gradients, 1, marks=pytest.mark.full) for build in OTHER_CLASSES),
    ],
    ids=name_of,
)
def test_changes_compile_few_graphs(build: type, change: Callable[[Any, int], None], max_graphs: int) -> None:
    def train(wrap: Callable[[Any], Callable[..., Any]]) -> Any:
        params = make_params()
        optimizer = build([{"params": [p]} for p in params])
        step = wrap(optimizer)
        for number in range(4):
            give_gradients(params, number)
            change(optimizer, number)
            step()
        return snapshot(optimizer)

    assert_same(train(compiled), train(lambda o: o.step))
    assert graph_count() <= max_graphs


def test_a_compiled_step_with_a_closure_returns_its_loss() -> None:
    def train(wrap: Callable[[Any], Callable[..., Any]]) -> Any:
        params = make_params()
        optimizer = optim.AdamW8bit(params)
        give_gradients(params, 0)
        loss = wrap(optimizer)(lambda: sum((p * p).sum() for p in params))
        return loss.detach(), snapshot(optimizer)

    (loss, result), (eager_loss, expected) = train(compiled), train(lambda o: o.step)
    torch.testing.assert_close(loss, eager_loss)
    assert_same(result, expected)


@needs_cpp
def test_the_backend_asked_for_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params()
    optimizer = optim.AdamW8bit(params)
    step = compiled(optimizer)
    from memkern.reference import adam

    of_reference = mock.Mock(wraps=adam.adam_moments)
    monkeypatch.setattr(adam, "adam_moments", of_reference)
    for seed in range(4):
        give_gradients(params, seed)
        if seed in (1, 3):
            with memkern.use_backend("reference"):
                step()
        else:
            with memkern.use_backend("cpu"):
                step()
        assert of_reference.called == (seed in (1, 3))
        of_reference.reset_mock()
    assert graph_count() == 2  # one for each backend


def test_autograd_sees_that_parameters_changed() -> None:
    params = make_params()
    step = compiled(optim.AdamW8bit(params))
    for seed in range(2):
        loss = sum((p * p).sum() for p in params)
        give_gradients(params, seed)
        step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_a_step_compiled_by_inductor_has_the_bits_of_eager_mode() -> None:
    expected = run(optim.AdamW8bit, "changing float", lambda o: o.step)
    assert_same(run(optim.AdamW8bit, "changing float", lambda o: compiled(o, "inductor")), expected)
    assert graph_count() <= 2


@pytest.mark.parametrize("build", [optim.Muon, optim.Muon8bit], ids=name_of)
def test_muon_compiles_with_both_of_its_algorithms(build: type) -> None:
    def train(wrap: Callable[[Any], Callable[..., Any]]) -> Any:
        params = make_params([(64, 96), (96, 64), (80,)])
        groups = [{"params": params[:2]}, {"params": params[2:], "algorithm": "adamw", "lr": 1e-3}]
        optimizer = build(groups, min_8bit_size=0)
        step = wrap(optimizer)
        for i in range(3):
            give_gradients(params, i)
            step()
        return snapshot(optimizer)

    assert_same(train(compiled), train(lambda optimizer: optimizer.step))
