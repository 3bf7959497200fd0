"""compress(saved_bits=...) of sharded models: nothing is derived from weights that FSDP frees after a forward pass."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import memkern
from tests.saved.helpers import ERRORS, PostNorm, error, network
from tests.support.ranks import Ranks

FULLY_SHARD = {"fully_shard": True, "fully_shard, weights stay": False}  # reshard_after_forward
FSDP1 = {"FSDP1": False, "FSDP1, use_orig_params": True}


def wrapped(net: nn.Module, blocks: Any, how: str) -> nn.Module:
    if how in FSDP1:
        policy = ModuleWrapPolicy({type(block) for block in blocks})
        device = torch.device("cpu")
        return FullyShardedDataParallel(
            net, auto_wrap_policy=policy, use_orig_params=FSDP1[how], device_id=device
        )
    for block in blocks:
        fully_shard(block, reshard_after_forward=FULLY_SHARD[how])
    return fully_shard(net)


def whole_gradients(net: nn.Module, how: str) -> dict[str, Tensor]:
    whole = contextlib.nullcontext()
    if how == "FSDP1, use_orig_params":
        whole = FullyShardedDataParallel.summon_full_params(net, with_grads=True)
    with whole:
        found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        return {
            name: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for name, g in found.items()
        }


def errors(how: str, bits: Any) -> list[float]:
    """Of the gradients of two forward passes, compressed before the wrapping and after it."""

    def trained(when: str) -> dict[str, Tensor]:
        net, x = network()
        if when == "before":
            memkern.compress(net, saved_bits=bits, activations=None)
        net = wrapped(net, [m for m in net if isinstance(m, PostNorm)], how)
        if when == "after":
            memkern.compress(net, saved_bits=bits, activations=None)
        losses = [net(x).square().mean() for _ in range(1 if how in FSDP1 else 2)]
        for loss in losses:  # the first backward pass frees the weights, the second needs them again
            loss.backward()
        return whole_gradients(net, how)

    expected = trained("never")
    return [error(trained(when), expected) for when in ("before", "after")]


@pytest.mark.feature("torch", "`compress(saved_bits=...)` under `fully_shard` and FSDP1 on 1 and 2 processes")
@pytest.mark.full
@pytest.mark.parametrize("how", [*FULLY_SHARD, *FSDP1])
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_of_a_sharded_model(ranks: Ranks, how: str, world: int) -> None:
    for bits, most in ERRORS.items():
        for found in ranks(world, errors, how, bits):
            assert max(found) < most, (bits, found)


def errors_of_models(how: str, bits: Any) -> dict[str, float]:
    import transformers

    torch.set_num_threads(1)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    of_bart = {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
    }
    of_bart |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 97, "dropout": 0.0}
    configs = {
        "BertForMaskedLM": transformers.BertConfig(num_attention_heads=2, **sizes, **no_dropout),
        "BartForConditionalGeneration": transformers.BartConfig(**of_bart),
        "LlamaForCausalLM": transformers.LlamaConfig(num_attention_heads=2, **sizes),
        "Qwen3ForCausalLM": transformers.Qwen3Config(num_attention_heads=2, num_key_value_heads=2, **sizes),
        "MixtralForCausalLM": transformers.MixtralConfig(
            num_attention_heads=2, num_key_value_heads=2, **sizes
        ),
    }
    tokens = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    found = {}
    for name, config in configs.items():
        config.use_cache = False

        def trained(bits: Any, name: str = name, config: Any = config) -> dict[str, Tensor]:
            torch.manual_seed(0)
            model = getattr(transformers, name)(config)
            if bits is not None:
                memkern.compress(model, saved_bits=bits)
            blocks = [m for m in model.modules() if type(m).__name__.endswith(("Layer", "EncoderLayer"))]
            wrapped(model, blocks, how)
            model(input_ids=tokens, labels=tokens).loss.backward()
            return whole_gradients(model, how)

        found[name] = error(trained(bits), trained(None))
    return found


@pytest.mark.feature(
    "transformers", "`compress(saved_bits=...)` of BERT, BART, Llama, Qwen3, Mixtral under `fully_shard`"
)
@pytest.mark.full
@pytest.mark.parametrize("how", FULLY_SHARD)
@pytest.mark.parametrize("bits", [8, "exact"])
def test_gradients_of_sharded_models_of_transformers(ranks: Ranks, how: str, bits: Any) -> None:
    pytest.importorskip("transformers")
    for found in ranks(2, errors_of_models, how, bits):
        assert all(each < ERRORS[bits] for each in found.values()), found
