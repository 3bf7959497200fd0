"""The Triton kernels in the interpreter, against the reference: test_triton.py runs this file with TRITON_INTERPRET=1.

One call steps many tensors, of every layout, dtype and kind of state: a program takes a millisecond here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import memkern.triton
from memkern import reference
from memkern.quant.layout import layer_count
from memkern.schemas import STEP_OPS, StepArgs
from memkern.triton import tensor_table
from tests.support.helpers import FLOATS, LAYOUTS, assert_same, like, tensor
from tests.support.interpreted import interpreted
from tests.support.step_lists import pack

MIXED = [
    (layout, FLOATS[i % 3], FLOATS[(i // 3 + i) % 3], ("codes", "fp32")[i // 2 % 2], i % 2)
    for i, layout in enumerate(LAYOUTS)
]
CODES = [(layout, p, g, "codes", group) for layout, p, g, _, group in MIXED]
DTYPES = [("whole blocks", p, g, kind, 0) for p, g, kind in itertools.product(FLOATS, FLOATS, ("codes", "fp32"))]
MANY = [("one element", torch.float32, torch.float32, ("codes", "fp32")[i % 2], i % 3 == 0) for i in range(131)]
CASES: dict[str, dict[str, Any]] = {
    "every layout": {"tensors": MIXED},
    "backwards, scaled, clipped, coupled, maximized": {
        "tensors": MIXED[::-1],
        "scaler": 0.0,
        "grad_norm": 3.7,
        "decoupled": 0,
        "maximize": 1,
    },
    "not clipped": {"tensors": MIXED[:3], "grad_norm": 0.5},
    "the norm is NaN": {"tensors": MIXED[4:7], "grad_norm": float("nan")},
    "skipped": {"tensors": MIXED[:4], "scaler": 1.0},
    "codes": {"tensors": CODES, "codec": [1, 0], "block_size": [64, 256]},
    "small and large blocks": {"tensors": CODES[::2], "codec": [0, 1], "block_size": [8, 4096]},
    "every dtype": {"tensors": DTYPES},
    "more than a program of the prologue takes": {"tensors": MANY},
    "nothing": {"tensors": []},
}

pytestmark = interpreted()


def spoilt(x: Tensor) -> Tensor:
    if x.numel() > 20:
        x.as_strided((3,), (1,), x.storage_offset() + 3).copy_(torch.tensor([torch.nan, torch.inf, -torch.inf]))
    return x


def arguments(
    name: str,
    tensors: list[tuple[str, torch.dtype, torch.dtype, str, int]],
    codec: list[int] | None = None,
    block_size: list[int] | None = None,
    scaler: float | None = None,
    grad_norm: float | None = None,
    decoupled: int = 1,
    maximize: int = 0,
    layers: int = 1,
) -> StepArgs:
    codec, block_size = codec or [0, 1], block_size or [128, 128]
    keys = (
        "params",
        "grads",
        "exp_avgs",
        "exp_avg_sqs",
        "exp_avg_scales",
        "exp_avg_sq_scales",
        "steps",
        "group",
    )
    lists: dict[str, Any] = {key: [] for key in (*keys, "trust_ratios")}
    for i, (layout, p_dtype, g_dtype, kind, group) in enumerate(tensors):
        p = tensor(layout, p_dtype, seed=i, scale=0.1)
        states = {
            "exp_avg": like(p, i + 200, torch.float32),
            "exp_avg_sq": like(p, i + 300, torch.float32, signed=False),
        }
        for key, x in states.items():
            if kind == "codes":
                x, scale = reference.quantize_blockwise(x, codec[group], key == "exp_avg", block_size[group])
                lists[f"{key}_scales"].append(scale)
            lists[f"{key}s"].append(x)
        lists["params"].append(p)
        lists["grads"].append(spoilt(like(p, i + 100, g_dtype)))
        lists["steps"].append(torch.tensor(float(i)))
        lists["group"].append(int(group))
        lists["trust_ratios"].append(torch.full((layer_count(p, block_size[group], layers),), 0.5))
    return pack(
        name,
        lists
        | hyperparameters(name, decoupled, maximize)
        | {
            "layers": [layers, 1],
            "lr": [torch.tensor(1e-2, dtype=torch.float64), torch.tensor(3e-3)],
            "codec": codec,
            "block_size": block_size,
            "grad_scale": None if scaler is None else torch.tensor(4.0),
            "found_inf": None if scaler is None else torch.tensor(scaler),
            "grad_norm": None if grad_norm is None else torch.tensor(grad_norm, dtype=torch.float64),
            "max_grad_norm": 1.3,
        },
    )


def hyperparameters(name: str, decoupled: int, maximize: int) -> dict[str, list[float]]:
    lamb, lars = name == "lamb_step_", name == "lars_step_"
    return {
        "beta1": [0.9, 0.95],
        "beta2": [0.99, 0.98] if name == "lion_step_" else [0.999, 0.99],
        "eps": [1e-8, 0.0] if lamb else [0.0, 1e-8] if lars else [1e-8, 1e-6],
        "weight_decay": [0.1, 0.0],
        "decoupled_weight_decay": [decoupled, 1 - decoupled],
        "decoupled_decay": [1 - decoupled, decoupled],
        "bias_correction": [1, 0],
        "momentum": [0.9, 0.95],
        "dampening": [0.5, 0.0] if name == "sgd_step_" else [0.0, 0.0],
        "nesterov": [0, 1],
        "trust_coeff": [0.0, 1e-2],
        "trust_clip": [maximize, 0],
        "always_adapt": [0, decoupled] if lamb else [0, 1],
        "maximize": [maximize, 0],
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", STEP_OPS)
def test_steps(name: str, case: str) -> None:
    if case.startswith("more") and name not in ("lamb_step_", "lion_step_"):
        pytest.skip("the prologues of these two cover it; a program takes a millisecond here")
    actual, expected = arguments(name, **CASES[case]), arguments(name, **CASES[case])
    for _ in range(2):
        getattr(memkern.triton, name)(actual)
        getattr(reference, name)(expected)
        assert_same([*actual], [*expected])


@pytest.mark.parametrize("name", ["lamb_step_", "lars_step_"])
@pytest.mark.parametrize("layers", [3, 0], ids=["three", "rows"])
def test_layers_of_a_tensor(name: str, layers: int) -> None:
    tensors = [
        (layout, torch.float32, torch.float32, kind, 0)
        for layout in ("long rows", "whole blocks")
        for kind in ("codes", "fp32")
    ]
    made = [arguments(name, tensors, block_size=[8, 8], layers=layers) for _ in range(2)]
    for _ in range(2):
        getattr(memkern.triton, name)(made[0])
        getattr(reference, name)(made[1])
        assert_same([*made[0]], [*made[1]])
    assert len(made[0].trust_ratios[0].unique()) == 3


@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("tensors", ["every layout", "one", "large", "none"])
def test_grad_norm(tensors: str, scale: float | None) -> None:
    grads = {
        "every layout": [tensor(layout, dtype) for layout in LAYOUTS for dtype in FLOATS],
        "one": [tensor("odd")],
        "large": [torch.randn(70001), torch.randn(1 << 17).bfloat16(), torch.randn(3)],
        "none": [],
    }[tensors]
    grad_scale = None if scale is None else torch.tensor(scale)
    actual, expected, again = (torch.full((), -1.0, dtype=torch.float64) for _ in range(3))
    memkern.triton.grad_norm_(actual, grads, grad_scale)
    memkern.triton.grad_norm_(again, grads, grad_scale)
    reference.grad_norm_(expected, grads, grad_scale)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    assert_same(again, actual)


# ---- plans


def test_a_plan_is_kept_while_nothing_moves() -> None:
    args = arguments("lion_step_", MIXED)
    memkern.triton.lion_step_(args)
    plans = [*tensor_table._plans.values()]
    args = args._replace(grads=[x.clone() for x in args.grads])  # gradients move all the time
    args.hyperparameters[0] *= 0.5
    memkern.triton.lion_step_(args)
    assert [*tensor_table._plans.values()] == plans


def unaligned(x: Tensor) -> Tensor:
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].as_strided(x.shape, x.stride()).copy_(x)


def transposed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The first one, in the same memory."""
    return [tensors[0].t(), *tensors[1:]]


CHANGES: dict[str, Callable[[StepArgs], StepArgs]] = {
    "gradients move": lambda a: a._replace(grads=[x.clone() for x in a.grads]),
    "gradients lose their alignment": lambda a: a._replace(grads=[*map(unaligned, a.grads)]),
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
    square = [("whole blocks", torch.float32, torch.float32, "fp32", 0)]
    made = [arguments("lion_step_", square + MIXED, codec=[0, 0]) for _ in range(2)]
    for step in range(2):
        if step:
            made = [CHANGES[change](args) for args in made]
        memkern.triton.lion_step_(made[0])
        reference.lion_step_(made[1])
    assert_same([*made[0]], [*made[1]])


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_table, "MAX_PLANS", 8)
    monkeypatch.setattr(tensor_table, "MAX_WORDS", 3_600)
    tensor_table._plans.clear()
    steps = [arguments("lion_step_", MIXED[4:5]) for _ in range(20)]
    for args in steps:
        memkern.triton.lion_step_(args)
    assert len(steps) > len(tensor_table._plans) > tensor_table.MAX_PLANS
    assert tensor_table._plans.words <= 3_600
    assert tensor_table._plans.words == sum(map(tensor_table.words_of, tensor_table._plans.values()))


def test_each_of_many_parameters_keeps_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As StepInBackward has it: the step of one parameter after the other, over and over."""
    monkeypatch.setattr(tensor_table, "MAX_PLANS", 8)
    steps = [arguments("lion_step_", MIXED[4:5]) for _ in range(3 * tensor_table.MAX_PLANS)]
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

            def copied(memory: tensor_table.DeviceTable, begin: int, values: Any, source: Tensor | None = None) -> None:
                assert source is not None, "pinned memory cannot be allocated in a capture"
                upload(memory, begin, values, source)
                target = memory.table[begin : begin + len(source)]
                target.fill_(-1)  # the copy is recorded, not made
                self.nodes.append((lambda target, source: target.copy_(source), (target, source)))

            patch.setattr(tensor_table.DeviceTable, "upload", copied)
            step()

    def replay(self) -> None:
        for call, args in self.nodes:
            call(*args)


@pytest.mark.parametrize("name", ["adam_step_", "lars_step_"])  # without layers, and with
def test_a_replay_depends_on_nothing_that_eager_steps_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, op = Graph(monkeypatch), getattr(memkern.triton, name)
    args, expected = (arguments(name, MIXED, scaler=0.0, grad_norm=3.7) for _ in range(2))
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
