"""The Triton backend's plans and graphs follow what changes; its GELU. test_triton.py runs this in the interpreter.

That its kernels give the reference's bits is tested in tests/kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import memkern.triton
from memkern import reference
from memkern.schemas import StepArgs
from memkern.triton import tensor_table
from tests.support.activation_kernels import compare_bf16_gelu
from tests.support.helpers import LAYOUTS, assert_same
from tests.support.interpreted import interpreted
from tests.support.kernels.arguments import MIXED, SCALER, step_args
from tests.support.kernels.hard_values import off

pytestmark = interpreted()


def test_gelu_of_every_bf16() -> None:
    assert compare_bf16_gelu(memkern.triton) == 11  # values that an exact erf, as the interpreter's, rounds otherwise


# ---- plans


def test_a_plan_is_kept_while_nothing_moves() -> None:
    args = step_args("lion_step_", **MIXED)
    memkern.triton.lion_step_(args)
    plans = [*tensor_table._plans.values()]
    args = args._replace(grads=[x.clone() for x in args.grads])  # gradients move all the time
    args.hyperparameters[0] *= 0.5
    memkern.triton.lion_step_(args)
    assert [*tensor_table._plans.values()] == plans


def transposed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, the first of them transposed in the same memory."""
    return [tensors[0].t(), *tensors[1:]]


CHANGES: dict[str, Callable[[StepArgs], StepArgs]] = {
    "gradients move": lambda a: a._replace(grads=[x.clone() for x in a.grads]),
    "gradients lose their alignment": off("grads"),
    "gradients change their dtype": lambda a: a._replace(grads=[x.bfloat16() for x in a.grads]),
    "a state moves": lambda a: a._replace(moments=[x.clone() for x in a.moments]),
    "lr changes": lambda a: a._replace(lr=[torch.full_like(a.lr[0], 0.5), *a.lr[1:]]),
    "a hyperparameter changes": lambda a: a._replace(hyperparameters=[0.5, *a.hyperparameters[1:]]),
    "groups change": lambda a: a._replace(group=[1 - i for i in a.group]),
    "the same memory, transposed": lambda a: a._replace(
        params=transposed(a.params), grads=transposed(a.grads), moments=transposed(a.moments)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_follows_what_changes(change: str) -> None:
    actual, expected = (step_args("lion_step_", ["whole blocks", *LAYOUTS], kinds="fp32", **MIXED) for _ in range(2))
    for step in range(2):
        if step:
            actual, expected = CHANGES[change](actual), CHANGES[change](expected)
        memkern.triton.lion_step_(actual)
        reference.lion_step_(expected)
    assert_same([*actual], [*expected])


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_table, "MAX_PLANS", 8)
    monkeypatch.setattr(tensor_table, "MAX_WORDS", 3_600)  # of more than 8 plans and less than 20
    tensor_table._plans.clear()
    steps = [step_args("lion_step_", ["1-D"]) for _ in range(20)]
    for args in steps:
        memkern.triton.lion_step_(args)
    assert len(steps) > len(tensor_table._plans) > tensor_table.MAX_PLANS
    assert tensor_table._plans.words <= 3_600
    assert tensor_table._plans.words == sum(map(tensor_table.words_of, tensor_table._plans.values()))


def test_each_of_many_parameters_keeps_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with StepInBackward: steps of one parameter after the other, over and over."""
    monkeypatch.setattr(tensor_table, "MAX_PLANS", 8)
    steps = [step_args("lion_step_", ["1-D"]) for _ in range(3 * tensor_table.MAX_PLANS)]
    for args in steps:
        memkern.triton.lion_step_(args)
    plans = {id(plan) for plan in tensor_table._plans.values()}
    for args in steps:
        memkern.triton.lion_step_(args)
    assert {id(plan) for plan in tensor_table._plans.values()} == plans


# ---- graphs


class Graph:
    """What a CUDA graph does: it records launches, and copies from the host, instead of running them, and replays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes: list[Any] = []
        self.patch = monkeypatch
        monkeypatch.setattr(tensor_table, "is_remote", lambda device: True)

    def capture(self, step: Any) -> None:
        upload, launch = tensor_table.DeviceTable.upload, tensor_table.Launch.__call__
        with self.patch.context() as patch:
            patch.setattr(tensor_table, "is_capturing", lambda device: True)
            patch.setattr(
                tensor_table.Launch,
                "__call__",
                lambda *args, **constants: self.nodes.append((partial(launch, **constants), args)),
            )

            def record(memory: tensor_table.DeviceTable, begin: int, values: Any, source: Tensor | None = None) -> None:
                assert source is not None, "pinned memory cannot be allocated in a capture"
                upload(memory, begin, values, source)
                target = memory.table[begin : begin + len(source)]
                target.fill_(-1)  # the copy is recorded, not made
                self.nodes.append((lambda target, source: target.copy_(source), (target, source)))

            patch.setattr(tensor_table.DeviceTable, "upload", record)
            step()

    def replay(self) -> None:
        for call, args in self.nodes:
            call(*args)


@pytest.mark.parametrize("name", ["adam_step_", "lars_step_"])  # without layers, and with
def test_a_replay_depends_on_nothing_that_eager_steps_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, op = Graph(monkeypatch), getattr(memkern.triton, name)
    args, expected = (step_args(name, **MIXED, **SCALER) for _ in range(2))
    tensor_table._spares.clear()
    with pytest.raises(RuntimeError, match="run one such step before each capture"):
        graph.capture(lambda: op(args))
    op(args)
    graph.capture(lambda: op(args))
    getattr(reference, name)(expected)
    assert_same([*args], [*expected])  # a capture runs nothing
    for rate in (1e-2, 0.5):
        args.lr[0].fill_(rate)
        expected.lr[0].fill_(rate)
        graph.replay()
        getattr(reference, name)(expected)
        assert_same([*args], [*expected])
        # An eager step with gradients elsewhere, in between.
        op(args._replace(grads=[x.clone() for x in args.grads]))
        getattr(reference, name)(expected)
        assert_same([*args], [*expected])
