"""Saved tensors on the host: gradients of the models of benchmarks/results/saved-models.csv have the same bits."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import memkern
from memkern.saved import offload
from tests.support import timm_nets, zoo
from tests.support.helpers import first_full
from tests.support.streams import Streams, WatchedLink

TOKENS = 512


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(zoo, "WIDTH", 128)
    monkeypatch.setattr(zoo, "HEAD", 32)
    monkeypatch.setattr("memkern.saved.link.LEAST_BYTES", 4096)


def gradients(name: str, precision: str, checkpoints: bool, **options: Any) -> dict[str, Tensor]:
    model, batch = zoo.build(name, TOKENS), zoo.batch(name, TOKENS)
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    memkern.compress(model, **options)
    autocast = contextlib.nullcontext() if precision == "fp32" else torch.autocast("cpu", torch.bfloat16)
    gc.disable()  # what a cycle still holds is not stored in codes, so a collection would decide which bits come out
    try:
        with autocast:
            loss = model(**batch).loss
    finally:
        gc.enable()
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check(name: str, precision: str, bits: Any, checkpoints: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    link = WatchedLink(Streams())
    monkeypatch.setattr(offload, "_links", {torch.device("cpu"): link})
    expected = gradients(name, precision, checkpoints, saved_bits=bits)
    found = gradients(name, precision, checkpoints, saved_bits=bits, offload=True)
    assert expected.keys() == found.keys()
    assert [n for n in expected if not torch.equal(found[n], expected[n])] == []
    assert checkpoints or {"down", "up"} <= {way for way, _ in link.log}  # two inputs may be held by the model
    assert link.streams.errors == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "bits"),
    [each for i, n in enumerate(zoo.MODELS) for each in first_full([(n, "exact"), (n, 8)][:: 1 if i % 2 else -1])],
)
def test_models(name: str, bits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    precision = "bf16 autocast" if bits == 8 else "fp32"
    check(name, precision, bits, False, monkeypatch)
    if name not in zoo.OF_IMAGES:
        check(name, precision, bits, True, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16 autocast"])
@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize("name", timm_nets.NETS)
def test_nets(name: str, bits: Any, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(name, precision, bits, False, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_models_in_the_other_precision(name: str, bits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check(name, "bf16 autocast" if bits == "exact" else "fp32", bits, False, monkeypatch)
