"""weights_on_host refuses unfit models, devices and optimizers before it changes anything."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import memkern
from memkern.stream.streaming import process_group
from memkern.techniques.options import OptionError
from tests.stream.runs import STREAMED, Model, optimizer_for

# ---- what is refused, before anything is changed


def sharded(model: Model) -> None:
    process_group()
    fully_shard(model.blocks[1])


EDITS: dict[str, Callable[[Model], Any]] = {
    "head.weight is on the meta device": lambda m: m.head.to("meta"),
    "blocks.1 is sharded by fully_shard already": sharded,
    "parameters of Block are in torch.bfloat16, torch.float32": lambda m: m.blocks[2].norm.float(),
    "embedding has max_norm, which writes weights in the forward pass": lambda m: setattr(m.embedding, "max_norm", 1.0),
    "parameters of Block belong to another block": lambda m: setattr(m.blocks[2].up, "weight", m.blocks[0].up.weight),
    "parameters of Model belong to another block": lambda m: setattr(m.norm, "weight", m.blocks[1].norm.weight),
    "scale has no dimension": lambda m: setattr(m, "scale", nn.Parameter(torch.tensor(1.0))),
    "head.weight is not contiguous": lambda m: setattr(m.head, "weight", nn.Parameter(torch.empty(64, 97).t())),
    "allowed: None for a model without a list of like blocks": lambda m: setattr(m, "blocks", m.blocks[:1]),
}


@pytest.mark.parametrize("message", EDITS)
def test_a_model_that_cannot_be_streamed_is_refused(message: str) -> None:
    model = Model().to(torch.bfloat16)
    EDITS[message](model)
    before = [(name, id(p)) for name, p in model.named_parameters()]
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    with pytest.raises(OptionError, match=re.escape(message)):
        memkern.apply(model, STREAMED.replace(activation_bits=3, checkpointing="blocks"), device="cpu")
    assert [(name, id(p)) for name, p in model.named_parameters()] == before
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert isinstance(model.blocks[0].act, nn.GELU)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(OptionError, match="device: 'tpu9' given; allowed: None, 'cpu', 'cuda', 'cuda:N'"):
        memkern.apply(Model(), STREAMED, device="tpu9")


def test_an_optimizer_that_is_made_before_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("params must be those that the model has after memkern.apply")):
        optimizer_for(Model().to(torch.bfloat16), STREAMED)


def test_one_of_several_processes_makes_its_group_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"one of 2 processes: call torch\.distributed\.init_process_group"):
        process_group()


def test_a_host_without_pinned_memory_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from memkern.stream import streaming

    def fails(*_: Any, **options: Any) -> None:
        assert options["offload_policy"].pin_memory
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(streaming, "fully_shard", fails)
    monkeypatch.setattr(streaming, "init_device_mesh", lambda *_: torch.empty(()))
    monkeypatch.setattr(streaming, "_shard_bytes", lambda *_: 2**30)
    with pytest.raises(RuntimeError, match=r"could not be moved to pinned memory .*ulimit -l.*pin_memory=False"):
        streaming.stream(Model(), torch.device("cuda"))
