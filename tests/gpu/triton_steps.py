"""The Triton kernels in the interpreter, against the reference: test_triton.py runs this file with TRITON_INTERPRET=1.

One call steps many tensors, of every layout, dtype and kind of state: a program takes a millisecond here.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import memkern.triton
from memkern import reference
from memkern.quant.layout import layer_count
from memkern.triton import table
from tests.support.helpers import FLOATS, LAYOUTS, assert_same, like, tensor

MIXED = [
    (layout, FLOATS[i % 3], FLOATS[(i // 3 + i) % 3], ("codes", "fp32")[i // 2 % 2], i % 2)
    for i, layout in enumerate(LAYOUTS)
]
CODES = [(layout, p, g, "codes", group) for layout, p, g, _, group in MIXED]
DTYPES = [
    ("whole blocks", p, g, kind, 0) for p, g, kind in itertools.product(FLOATS, FLOATS, ("codes", "fp32"))
]
MANY = [
    ("one element", torch.float32, torch.float32, ("codes", "fp32")[i % 2], i % 3 == 0) for i in range(131)
]
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
STEPS = ("adam_step_", "lamb_step_", "lars_step_", "lion_step_")


def spoilt(x: Tensor) -> Tensor:
    if x.numel() > 20:
        x.as_strided((3,), (1,), x.storage_offset() + 3).copy_(
            torch.tensor([torch.nan, torch.inf, -torch.inf])
        )
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
) -> list[Any]:
    codec, block_size = codec or [0, 1], block_size or [128, 128]
    lists: dict[str, list[Any]] = {
        key: [] for key in ("params", "grads", "m", "v", "m_scale", "v_scale", "steps", "group")
    }
    for i, (layout, p_dtype, g_dtype, kind, group) in enumerate(tensors):
        p = tensor(layout, p_dtype, seed=i, scale=0.1)
        states = {"m": like(p, i + 200, torch.float32), "v": like(p, i + 300, torch.float32, signed=False)}
        for key, x in states.items():
            if kind == "codes":
                x, scale = reference.quantize_blockwise(x, codec[group], key == "m", block_size[group])
                lists[f"{key}_scale"].append(scale)
            lists[key].append(x)
        lists["params"].append(p)
        lists["grads"].append(spoilt(like(p, i + 100, g_dtype)))
        lists["steps"].append(torch.tensor(float(i)))
        lists["group"].append(int(group))
    lr = [torch.tensor(1e-2, dtype=torch.float64), torch.tensor(3e-3)]
    tail = [
        codec,
        block_size,
        None if scaler is None else torch.tensor(4.0),
        None if scaler is None else torch.tensor(scaler),
        None if grad_norm is None else torch.tensor(grad_norm, dtype=torch.float64),
        1.3,
    ]
    both = [lists["params"], lists["grads"]]
    if name == "lion_step_":
        states = [lists[key] for key in ("m", "m_scale", "group")]
        return [*both, *states, lr, [0.9, 0.95], [0.99, 0.98], [0.1, 0.0], [maximize, 0], *tail]
    if name == "lars_step_":
        ratios = [torch.full((1,), 0.5) for _ in tensors]
        states = [*(lists[key] for key in ("m", "m_scale", "steps")), ratios, lists["group"]]
        options = [
            [0.9, 0.95],
            [0.0, 0.0],
            [0.1, 0.0],
            [0, 1],
            [0.0, 1e-2],
            [0.0, 1e-8],
            [maximize, 0],
            [0, 1],
        ]
        return [*both, *states, lr, *options, [1, 1], [maximize, 0], *tail]
    if name == "lamb_step_":
        ratios = [torch.full((1,), 0.5) for _ in tensors]
        states = [*(lists[key] for key in ("m", "v", "m_scale", "v_scale", "steps")), ratios, lists["group"]]
        options = [[0.9, 0.95], [0.999, 0.99], [1e-8, 0.0], [0.1, 0.0], [1 - decoupled, decoupled]]
        return [
            *both,
            *states,
            lr,
            *options,
            [1, 0],
            [maximize, 0],
            [0, decoupled],
            [1, 1],
            [maximize, 0],
            *tail,
        ]
    states = [lists[key] for key in ("m", "v", "m_scale", "v_scale", "steps", "group")]
    hyperparameters = [[0.9, 0.95], [0.999, 0.99], [1e-8, 1e-6], [0.1, 0.0], [decoupled, 1 - decoupled]]
    return [*both, *states, lr, *hyperparameters, [maximize, 0], *tail]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str, case: str) -> None:
    if name == "lars_step_" and case.startswith("more"):
        pytest.skip("LAMB's prologue covers it; a program takes a millisecond here")
    actual, expected = arguments(name, **CASES[case]), arguments(name, **CASES[case])
    for _ in range(2):
        getattr(memkern.triton, name)(*actual)
        getattr(reference, name)(*expected)
        assert_same(actual, expected)


@pytest.mark.parametrize("name", ["lamb_step_", "lars_step_"])
@pytest.mark.parametrize("layers", [3, 0], ids=["three", "rows"])
def test_layers_of_a_tensor(name: str, layers: int) -> None:
    tensors = [
        (layout, torch.float32, torch.float32, kind, 0)
        for layout in ("long rows", "whole blocks")
        for kind in ("codes", "fp32")
    ]
    made = [arguments(name, tensors, block_size=[8, 8]) for _ in range(2)]
    for args in made:
        at = 7 if name == "lamb_step_" else 5
        args[at] = [torch.ones(layer_count(p, 8, layers)) for p in args[0]]
        args[at + 2 + 9][0] = layers
    for _ in range(2):
        getattr(memkern.triton, name)(*made[0])
        getattr(reference, name)(*made[1])
        assert_same(*made)
    assert len(made[0][at][0].unique()) == 3


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


def moved(args: list[Any]) -> list[Any]:
    return [[x.clone() for x in a] if a and isinstance(a[0], Tensor) else a for a in args]


def test_a_plan_is_kept_while_nothing_moves() -> None:
    args = arguments("lion_step_", MIXED)
    memkern.triton.lion_step_(*args)
    plans = [*table._plans.values()]
    args[1] = [x.clone() for x in args[1]]  # gradients move all the time
    args[6][0] *= 0.5
    memkern.triton.lion_step_(*args)
    assert [*table._plans.values()] == plans


CHANGES = {
    "gradients move": lambda a: a.__setitem__(1, [x.clone() for x in a[1]]),
    "gradients lose their alignment": lambda a: a.__setitem__(
        1,
        [
            torch.empty(x.numel() + 1, dtype=x.dtype)[1:].as_strided(x.shape, x.stride()).copy_(x)
            for x in a[1]
        ],
    ),
    "gradients change their dtype": lambda a: a.__setitem__(1, [x.bfloat16() for x in a[1]]),
    "a state moves": lambda a: a.__setitem__(2, [x.clone() for x in a[2]]),
    "lr changes": lambda a: a[5][0].fill_(0.5),
    "a hyperparameter changes": lambda a: a.__setitem__(6, [0.5, 0.5]),
    "groups change": lambda a: a.__setitem__(4, [1 - i for i in a[4]]),
    "the same memory, transposed": lambda a: [
        a.__setitem__(k, [a[k][0].t(), *a[k][1:]]) for k in (0, 1, 2) if not a[3].append(a[3].pop())
    ],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_follows_what_changes(change: str) -> None:
    square = [("whole blocks", torch.float32, torch.float32, "fp32", 0)]
    made = [arguments("lion_step_", square + MIXED, codec=[0, 0]) for _ in range(2)]
    for step in range(2):
        for args, op in zip(made, (memkern.triton.lion_step_, reference.lion_step_), strict=True):
            if step:
                CHANGES[change](args)
            op(*args)
    assert_same(*made)


def test_plans_are_bounded() -> None:
    for _ in range(table.MAX_PLANS + 3):
        args = arguments("lion_step_", MIXED[4:5])
        memkern.triton.lion_step_(*args)
    assert len(table._plans) <= table.MAX_PLANS


# ---- graphs


class Graph:
    """What a CUDA graph does: it records launches, and copies from the host, instead of running them, and replays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes: list[Any] = []
        self.patch = monkeypatch
        monkeypatch.setattr(table, "is_remote", lambda device: True)

    def capture(self, step: Any) -> None:
        upload, launch = table.Room.upload, table.Launch.__call__
        with self.patch.context() as patch:
            patch.setattr(table, "is_capturing", lambda device: True)
            patch.setattr(table.Launch, "__call__", lambda *args: self.nodes.append((launch, args)))

            def copied(room: table.Room, begin: int, values: Any, source: Tensor | None = None) -> None:
                assert source is not None, "pinned memory cannot be allocated in a capture"
                upload(room, begin, values, source)
                target = room.table[begin : begin + len(source)]
                target.fill_(-1)  # the copy is recorded, not made
                self.nodes.append((lambda target, source: target.copy_(source), (target, source)))

            patch.setattr(table.Room, "upload", copied)
            step()

    def replay(self) -> None:
        for call, args in self.nodes:
            call(*args)


@pytest.mark.parametrize("name", STEPS)
def test_a_replay_depends_on_nothing_that_eager_steps_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, op = Graph(monkeypatch), getattr(memkern.triton, name)
    args, expected = (arguments(name, MIXED, scaler=0.0, grad_norm=3.7) for _ in range(2))
    lr = {"adam_step_": 8, "lamb_step_": 9, "lars_step_": 7, "lion_step_": 5}[name]
    table._spares.clear()
    with pytest.raises(RuntimeError, match="run one such step before each capture"):
        graph.capture(lambda: op(*args))
    op(*args)
    static = args[1]
    graph.capture(lambda: op(*args))
    getattr(reference, name)(*expected)
    assert_same(args, expected)  # a capture runs nothing
    for rate in (1e-2, 0.5):
        args[lr][0].fill_(rate)
        expected[lr][0].fill_(rate)
        graph.replay()
        getattr(reference, name)(*expected)
        assert_same(args, expected)
        # An eager step with gradients elsewhere, in between.
        args[1] = [x.clone() for x in static]
        op(*args)
        getattr(reference, name)(*expected)
        assert_same(args, expected)
