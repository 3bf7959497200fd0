"""memkern.apply(compile=True) refuses unfit models, runs with key-value caches, and gives blocks equal options."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import memkern
from memkern import OptionError, Techniques
from memkern.compiled import blocks as compiled_blocks
from memkern.planner.models import resolve

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def make_model() -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)]
    return nn.Sequential(nn.Sequential(*blocks), nn.Linear(8, 8))


# ---- edits that make a model, or this machine, unfit for compile=True; each returns the model


def compiled_before(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    model[1].compile()
    return model


def having_no_blocks(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU())


def under_an_old_torch(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.10.0"))
    return model


def without_cxx(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    from torch._inductor import cpp_builder, exc

    def absent() -> None:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", absent)
    return model


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (compiled_before, "compile: True given; allowed: False, as 1 is compiled already"),
        (having_no_blocks, "compile: True given; allowed: False for a model without a list of like blocks"),
        (under_an_old_torch, r"compile: True given with saved_bits=8: memkern.compile needs torch 2\.11 or later"),
        (without_cxx, "compile: True given, and no C\\+\\+ compiler is found"),
    ],
)  # fmt: skip
def test_an_unfit_model_is_left_as_it_is(edit: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = edit(make_model(), monkeypatch)
    with pytest.raises(OptionError, match=message):
        memkern.apply(model, Techniques(compile=True, saved_bits=8, linear_share=0.5, checkpointing="blocks"))
    assert not any("forward" in vars(module) for module in model.modules())
    assert {type(module) for module in model.modules()} == {nn.Sequential, nn.Linear, nn.GELU}


def test_a_compiled_model_keeps_its_keys_and_is_refused_by_apply_and_plan() -> None:
    model = make_model()
    memkern.apply(model, Techniques(compile=True, checkpointing="blocks"))
    assert list(model.state_dict()) == list(make_model().state_dict())
    for refused in (
        lambda: memkern.apply(model, Techniques(compile=True)),
        lambda: resolve(model, None, torch.ones(2, 8), None, None),
    ):
        with pytest.raises(OptionError, match="compile"):
            refused()


@pytest.mark.full
def test_blocks_with_key_value_caches_compute_as_without_compile() -> None:
    """transformers' models make a cache by default: it is left out of a training step, and filled in generation."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 10, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    gpt = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0
        )
    )
    ids = torch.randint(64, (2, 16))
    plain = copy.deepcopy(gpt)
    memkern.apply(gpt, Techniques(compile=True, saved_bits="exact"))
    for call in (gpt, plain):
        call(input_ids=ids, labels=ids).loss.backward()
    for p, expected in zip(gpt.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, expected.grad)
    # A learned prefix (prefix tuning) comes as a cache.
    prefix = [(torch.randn(2, 2, 3, 16, requires_grad=True), torch.randn(2, 2, 3, 16)) for _ in range(10)]
    cached = [transformers.DynamicCache(prefix, config=gpt.config) for _ in range(2)]
    logits = [m(input_ids=ids, past_key_values=c).logits for m, c in zip((gpt, plain), cached, strict=True)]
    torch.testing.assert_close(*logits)
    actual, expected = (m.eval().generate(ids[:, :4], max_new_tokens=8, do_sample=False) for m in (gpt, plain))
    assert torch.equal(actual, expected)
    assert counters["stats"]["unique_graphs"] == 1


def test_blocks_get_equal_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """With unequal options torch would compile every block by itself, and each block again after it was pickled."""
    calls = []
    monkeypatch.setattr(compiled_blocks.torch, "compile", lambda f, **options: calls.append(options) or f)
    model = make_model()
    memkern.apply(model, Techniques(compile=True, memory_budget=1, activation_bits=2))
    assert len(calls) == 1
    partitioner = calls[0]["options"]["custom_partitioner_fn"]
    assert (partitioner.bits, partitioner.memory_budget, partitioner.activations) == ("exact", 1.0, 2)
    assert type(partitioner.memory_budget) is float  # an int would be bytes; 1.0 is a share
    pickle.loads(pickle.dumps(model))
    assert calls == 2 * calls[:1]
