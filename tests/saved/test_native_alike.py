"""The hooks in C++ decide as Python's do, and have their bits: programs, models, and where data go elsewhere."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import memkern
from memkern import memory, schemas
from memkern.saved import extension, link
from tests.support import zoo

from . import programs
from .decisions import check_equal
from .helpers import Model, ids
from .programs import Program

pytestmark = pytest.mark.skipif(extension.missing() is not None, reason=f"{extension.missing()}")
BITS = pytest.mark.parametrize("bits", ["exact", 8])


def _program(seed: int, bits: Any) -> Callable[[], tuple[Tensor, list[Tensor]]]:
    def run() -> tuple[Tensor, list[Tensor]]:
        program = Program(seed)
        leaves = [program.x, program.table, *program.weights, program.scale, program.shift]
        for leaf in leaves:
            leaf.requires_grad_()
        return program.run(bits), leaves

    return run


@BITS
def test_random_programs_are_decided_alike(bits: Any) -> None:
    assert sum(check_equal(_program(seed, bits)) for seed in range(910000, 910030)) > 500


@pytest.mark.full
@BITS
def test_many_random_programs_are_decided_alike(bits: Any) -> None:
    assert sum(check_equal(_program(seed, bits)) for seed in range(920000, 920200)) > 4000


class _Hooks:
    """Hooks around a block, which keep numbers for what they are given."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def pack(self, x: Tensor) -> int:
        self.kept.append(x.clone())
        return len(self.kept) - 1

    def unpack(self, number: int) -> Tensor:
        return self.kept[number]


def _around(name: str, run: Callable[[], Any]) -> Callable[[], Any]:
    def hooked() -> Any:
        hooks = _Hooks()
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            found = run()
        assert hooks.kept or not torch.is_grad_enabled()
        return found

    def offloaded() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(link, "LEAST_BYTES", 1)
            block = functools.partial(memkern.quantize_saved, offload=True, offload_ahead=0)
            patch.setattr(programs.memkern, "quantize_saved", block)
            return run()

    return hooked if name == "hooks" else offloaded


@pytest.mark.parametrize("name", ["hooks", "offload"])
@BITS
def test_what_goes_elsewhere_is_decided_alike(bits: Any, name: str) -> None:
    seeds = range(930000, 930015)
    assert sum(check_equal(_around(name, _program(seed, bits))) for seed in seeds) > 200


@pytest.mark.full
@pytest.mark.parametrize("name", ["hooks", "offload"])
@BITS
def test_much_that_goes_elsewhere_is_decided_alike(bits: Any, name: str) -> None:
    for seed in range(940000, 940100):
        check_equal(_around(name, _program(seed, bits)))


def _value_checks() -> dict[str, int]:
    """How often a step calls the ops of a CPU that tell of values (HOST_OPS)."""
    model = Model()
    with torch.profiler.profile() as profile:
        with memkern.quantize_saved(8):
            loss = model(ids()).square().mean()
        loss.backward()
    counts = {event.key: event.count for event in profile.key_averages()}
    return {name: counts.get(f"memkern::{name}", 0) for name in schemas.HOST_OPS}


def test_values_are_asked_by_the_same_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _value_checks()
    assert min(found.values()) > 0
    monkeypatch.setattr(extension, "missing", lambda: "for comparison")
    assert _value_checks() == found


MODELS = ["Llama", "GPT-2", "BERT", "ViT", "Mixtral", "T5", "MobileNetV3", "EfficientNet-B0"]


def _check_model(name: str, bits: Any, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "WIDTH", 128)
    monkeypatch.setattr(zoo, "HEAD", 32)

    def run() -> tuple[Tensor, list[Tensor]]:
        model, batch = zoo.build(name, 512), zoo.batch(name, 512)
        memkern.compress(model, saved_bits=bits)
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = model(**batch).loss
        return loss, [p for p in model.parameters() if p.requires_grad]

    assert check_equal(run) > 50


@BITS
@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_is_decided_alike(bits: Any, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _check_model("Llama", bits, autocast, monkeypatch)


@pytest.mark.pairwise
@pytest.mark.full
@BITS
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_models_are_decided_alike(name: str, bits: Any, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _check_model(name, bits, autocast, monkeypatch)


# ---- what is held


def _bytes(name: str, bits: Any, autocast: bool) -> tuple[int, int]:
    """At the peak of a step, and after a forward pass."""
    model, batch = zoo.build(name, 512), zoo.batch(name, 512)

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            return model(**batch).loss

    def step() -> None:
        forward().backward()
        model.zero_grad()

    with memkern.quantize_saved(bits):
        step()
        gc.collect()
        return memory.peak_bytes(step, model), memory.live_bytes_after(forward, model)


# Each model in one of its four ways; the other three take 7 seconds each.
WAYS = [(name, bits, autocast) for name in MODELS for bits in ("exact", 8) for autocast in (False, True)]


@pytest.mark.parametrize(
    ("name", "bits", "autocast"),
    [
        pytest.param(*way, marks=pytest.mark.full if i % 4 == i // 4 % 4 else pytest.mark.long)
        for i, way in enumerate(WAYS)
    ],
)
def test_the_peaks_of_models_are_python_s(
    name: str, bits: Any, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo, "WIDTH", 128)
    monkeypatch.setattr(zoo, "HEAD", 32)
    importlib.import_module("torch._dynamo")  # torch does in the first backward pass, which leaves cycles
    gc.collect()
    gc.disable()
    try:
        found = _bytes(name, bits, autocast)
        monkeypatch.setattr(extension, "missing", lambda: "for comparison")
        expected = _bytes(name, bits, autocast)
        assert found == expected
    finally:
        gc.enable()
