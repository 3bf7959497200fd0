"""Plans count a step on fake CUDA tensors, else on fake CPU tensors; they refuse modules that cannot be counted."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memkern
from memkern.planner import fake_cuda, fake_step, models
from memkern.planner.models import resolve
from memkern.planner.prediction import ON_CPU_TENSORS
from memkern.techniques.options import OptionError, Techniques
from tests.support.helpers import needs_fake_cuda

COUNTED: dict[str, Any] = {"memory": "1GiB", "inputs": torch.zeros(2, 4)}


def fails(*_: Any, **__: Any) -> None:
    raise RuntimeError("it failed")


@pytest.mark.parametrize(
    ("for_gpus", "compiler", "reason"),
    [
        (False, None, "no C++ compiler is found"),
        (True, "c++", "this torch is built for GPUs and finds none"),
        (False, "c++", "it failed"),
    ],
)
def test_a_plan_on_fake_cpu_tensors_warns_and_says_so(
    monkeypatch: pytest.MonkeyPatch, for_gpus: bool, compiler: str | None, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fake_cuda, "compiler", lambda: compiler)
    monkeypatch.setattr(fake_cuda, "torch_has_gpus", lambda: for_gpus)
    monkeypatch.setattr(fake_cuda, "call", fails)
    with pytest.warns(UserWarning, match=f"fake CPU tensors, with a wider band: {re.escape(reason)}"):
        plan = memkern.plan(nn.Linear(4, 4), **COUNTED)
    assert plan.counted_on == ON_CPU_TENSORS
    assert f"Not counted on fake CUDA tensors: {reason}" in str(plan)


def test_a_model_that_cannot_be_sent_to_another_process_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the model cannot be sent to a process with fake CUDA tensors"):
        fake_cuda.call(lambda: None)


def test_compiled_and_sharded_modules_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = nn.Sequential(nn.Linear(4, 4))
    compiled[0].compile()
    for module in (compiled, torch.compile(nn.Linear(4, 4))):
        with pytest.raises(OptionError, match=r"a module before it is compiled: techniques with compile=True"):
            memkern.plan(module, **COUNTED)
    monkeypatch.setattr(models, "is_dtensor", lambda p: True)
    with pytest.raises(OptionError, match="'Linear with parameters that are DTensors' given; allowed: a module before"):
        memkern.plan(nn.Linear(4, 4), **COUNTED)


def test_attention_masks_are_counted_for_models_that_take_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 100, "n_positions": 64}
    config = transformers.GPT2Config(**sizes, architectures=["GPT2LMHeadModel"])
    plain, padded = (resolve(config, 64, None, None, 0.0, mask) for mask in (False, True))
    saved, with_mask = (fake_step.trace(s, Techniques(micro_batch=3), "cpu").saved for s in (plain, padded))
    assert with_mask >= saved + 3 * 64 * 64
    mask: Any = padded.batch(2)
    assert mask["attention_mask"].sum(1).tolist() == [63, 63]
    for model, why in (("vit-base", "ViTForImageClassification, which takes no tokens"), (nn.Linear(4, 4), "a module")):
        with pytest.raises(OptionError, match=f"attention_mask: True given; allowed: False for {why}"):
            memkern.plan(model, attention_mask=True, **COUNTED)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {  # to make a tensor of Python numbers in a forward pass
    "a list": lambda x: x[..., [-2, 1]],
    "a range": lambda x: x[:, range(2)],
    "a mask": lambda x: x[[True, False, True, True]],
    "as_tensor": lambda x: x + torch.as_tensor([2.0], device=x.device),
    "new_tensor": lambda x: x + x.new_tensor(2.0),
    "tensor": lambda x: x.index_select(-1, torch.tensor([1, 2], device=x.device)),
}


class Block(nn.Module):
    """A block whose forward pass makes a tensor of Python numbers, in one of WAYS."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(64, 64), way

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        return y + WAYS[self.way](y).sum()


def saved(way: str, device: str) -> list[int]:
    """The bytes that a step saves, without and with checkpoints."""
    model = nn.Sequential(*(Block(way) for _ in range(3)))
    source = resolve(model, None, torch.zeros(4, 64), None, None)
    techniques: tuple[dict[str, Any], ...] = ({}, {"checkpointing": "blocks"})
    return [fake_step.trace(source, Techniques(micro_batch=4, **each), device).saved for each in techniques]


class Offloaded(nn.Sequential):
    """Saves on the host what the backward pass needs."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


def on_cuda() -> tuple[dict[str, list[int]], set[str], list[int]]:
    """The saved bytes of each of WAYS, the operators that a step with SiLU and Mish runs, and the saved bytes of two
    layers, on the device and on the host."""
    source = resolve(nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Mish()), None, torch.zeros(2, 4), None, None)
    operators = {str(operator) for operator, *_ in fake_step.trace(source, Techniques(), "cuda").operators}
    layers = [nn.Linear(4, 4), nn.Tanh()]
    sources = (resolve(cls(*layers), None, torch.zeros(2, 4), None, None) for cls in (nn.Sequential, Offloaded))
    on_either = [fake_step.trace(each, Techniques(micro_batch=100), "cuda").saved for each in sources]
    return {way: saved(way, "cuda") for way in WAYS}, operators, on_either


@needs_fake_cuda
def test_models_on_the_fake_device_save_the_bytes_of_the_cpu() -> None:
    """Blocks can make tensors of numbers there, in a checkpoint's second run, too: Falcon's blocks index by lists. The
    backward passes of SiLU and Mish are one operator each, though torch without CUDA decomposes them."""
    found, operators, (on_device, on_host) = fake_cuda.call(on_cuda)
    assert found == {way: saved(way, "cpu") for way in WAYS}
    assert all(with_checkpoints < as_it_is for as_it_is, with_checkpoints in found.values())
    assert {"aten.silu_backward.default", "aten.mish_backward.default"} <= operators
    assert "aten.sigmoid.default" not in operators
    assert on_host < 100 <= on_device  # the loss remains
