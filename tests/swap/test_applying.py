"""memkern.apply and make_optimizer do what Techniques say, also with transformers' key-value caches."""

from typing import Any

import pytest
import torch
from torch import nn

import memkern
from memkern import Techniques, optim
from memkern.memory import LiveBytes
from tests.support import zoo


def model() -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Sequential(*blocks), nn.Linear(8, 8))


def kinds(net: nn.Module) -> list[str]:
    return [type(module).__name__ for module in net.modules()]


def test_a_model_has_what_compress_and_checkpoint_blocks_make() -> None:
    applied, by_hand = model(), model()
    memkern.apply(applied, Techniques(activation_bits=2, linear_share=0.5, checkpointing="blocks", checkpoint_every=2))
    memkern.compress(by_hand, 2, linear=0.5)
    assert kinds(applied) == kinds(by_hand) != kinds(model())
    assert (applied[0][0][0].share, applied[0][0][1].bits) == (0.5, 2)
    assert ["forward" in vars(block) for block in applied[0]] == [True] * 4
    assert not any("forward" in vars(block) for block in by_hand[0])


SMALL = {"GPT-2": {"n_embd": 64, "n_head": 2}, "Llama": {"hidden_size": 64}}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", SMALL)
def test_a_checkpointed_block_fills_no_cache(name: str, every: int) -> None:
    """transformers' use_cache is on by default: a cache would live through the backward pass and be filled twice."""
    pytest.importorskip("transformers")
    ids = torch.randint(zoo.VOCABULARY, (2, 32))
    peaks, gradients, filled = [], [], []
    for use_cache in (False, True):
        gpt = zoo.build(name, 32, **SMALL[name])
        memkern.checkpoint_blocks(gpt, every=every)
        live = LiveBytes([*gpt.parameters()])
        with live:
            output = gpt.base_model(ids, use_cache=use_cache)
            output.last_hidden_state.square().sum().backward()
        peaks.append(live.peak)
        gradients.append([p.grad for p in gpt.base_model.parameters()])
        with torch.no_grad():  # as generate does
            cache = gpt.base_model(ids, use_cache=use_cache).past_key_values
            filled.append(cache and cache.get_seq_length())
    assert all(map(torch.equal, *gradients))
    assert peaks[0] == peaks[1]
    assert filled == [None, 32]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", SMALL)
def test_a_filled_cache_is_used(name: str, every: int) -> None:
    """The cache of a learned prefix (prefix tuning) is read, and its gradient is as without checkpoints."""
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(zoo.VOCABULARY, (2, 8))
    results = []
    for checkpointed in (False, True):
        gpt = zoo.build(name, 32, **SMALL[name])
        if checkpointed:
            memkern.checkpoint_blocks(gpt, every=every)
        cache, prefix = transformers.DynamicCache(), []
        for layer in range(zoo.LAYERS):
            heads = getattr(gpt.config, "num_key_value_heads", 2)
            size = (2, heads, 3, 64 // gpt.config.num_attention_heads)
            prefix.append(torch.randn(size, generator=torch.Generator().manual_seed(layer)).requires_grad_())
            cache.update(prefix[-1], prefix[-1], layer)
        out = gpt(ids, past_key_values=cache).logits
        out.square().mean().backward()
        results.append([out, *(x.grad for x in prefix), *(p.grad for p in gpt.parameters())])
    assert all(map(torch.equal, *results))


def test_plain_techniques_change_nothing() -> None:
    plain = model()
    memkern.apply(plain, Techniques(precision="bf16", offload="cpu", loss_chunk=3))
    assert kinds(plain) == kinds(model())
    assert not any("forward" in vars(module) for module in plain.modules())


@pytest.mark.parametrize(
    ("changes", "wrapper", "cls", "options"),
    [
        ({"state_bits": 8}, None, optim.AdamW, {"state_bits": 8, "lr": 0.5}),
        ({"optimizer": "sgd"}, None, optim.SGD, {"momentum": 0.9, "state_bits": 32}),
        ({"optimizer": "torch-sgd"}, None, torch.optim.SGD, {"momentum": 0.9, "lr": 0.5}),
        ({"optimizer": "torch-adam", "step_in_backward": True}, optim.StepInBackward, torch.optim.Adam, {}),
        ({"optimizer": "lion", "offload": "cpu"}, optim.HostOffload, optim.Lion, {}),
        ({"offload": "device", "step_in_backward": True}, optim.StepInBackward, optim.AdamW, {"state_bits": 32}),
        ({"optimizer": "muon", "state_bits": 8}, None, optim.Muon, {"adjust_lr_fn": "match_rms_adamw"}),
        ({"precision": "bf16", "master_weights": "bf16+8"}, None, optim.AdamW, {"master_weights": "bf16+8"}),
    ],
    ids=str,
)
def test_the_optimizer_is_what_the_techniques_say(
    changes: dict[str, Any], wrapper: type | None, cls: type, options: dict[str, Any]
) -> None:
    techniques = Techniques(**changes)
    parameters = [nn.Parameter(torch.zeros(4, 4, dtype=memkern.techniques.applying.weight_dtype(techniques)))]
    optimizer = memkern.make_optimizer(parameters, techniques, lr=0.5)
    assert isinstance(optimizer, wrapper or cls)
    assert isinstance(optimizer, cls) or optimizer._class is cls
    assert {name: optimizer.param_groups[0][name] for name in options} == options


def test_what_cannot_be_applied_changes_nothing() -> None:
    flat = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    with pytest.raises(memkern.OptionError, match="checkpointing: 'blocks' given, and the model has no list"):
        memkern.apply(flat, Techniques(activation_bits=2, checkpointing="blocks"))
    assert kinds(flat) == ["Sequential", "Linear", "GELU"]
    assert type(flat[1]) is nn.GELU
    must_be = "must be memkern.Techniques"
    with pytest.raises(TypeError, match=f"techniques {must_be}, got dict"):
        memkern.apply(flat, {"activation_bits": 3})
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got method"):
        memkern.apply(flat.parameters, Techniques())
    with pytest.raises(TypeError, match=f"techniques {must_be}"):
        memkern.make_optimizer(flat.parameters(), None)
    with pytest.raises(ValueError, match="blocks: 'all' given; allowed: 'blocks'"):
        memkern.checkpoint_blocks(model(), "all")
