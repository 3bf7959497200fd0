"""compress(saved_bits=...) of sharded models: nothing is derived from weights that FSDP frees after a forward pass."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import memkern
from tests.saved.helpers import ERRORS, PostNorm, error, network
from tests.support.helpers import first_full
from tests.support.ranks import Ranks

ROOT = Path(__file__).parents[2]
FULLY_SHARD = {"fully_shard": True, "fully_shard, weights stay": False}  # reshard_after_forward
FSDP1 = {"FSDP1": False, "FSDP1, use_orig_params": True}


def wrapped(net: nn.Module, blocks: Any, how: str) -> nn.Module:
    if how in FSDP1:
        policy = ModuleWrapPolicy({type(block) for block in blocks})
        device = torch.device("cpu")
        return FullyShardedDataParallel(net, auto_wrap_policy=policy, use_orig_params=FSDP1[how], device_id=device)
    for block in blocks:
        fully_shard(block, reshard_after_forward=FULLY_SHARD[how])
    return fully_shard(net)


def whole_gradients(net: nn.Module, how: str) -> dict[str, Tensor]:
    whole = contextlib.nullcontext()
    if how == "FSDP1, use_orig_params":
        whole = FullyShardedDataParallel.summon_full_params(net, with_grads=True)
    with whole:
        found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        return {name: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for name, g in found.items()}


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


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("Bert", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "Llama": ("Llama", {}),
    "Mixtral": ("Mixtral", {"num_key_value_heads": 2}),
    "Qwen3": ("Qwen3", {"num_key_value_heads": 2}),
    "BART": (
        "Bart",
        {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
        | dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128)
        | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    ),
}
"""The families of transformers' classes, and what their small models have beside SIZES."""
SIZES = {
    **{"vocab_size": 97, "hidden_size": 64, "intermediate_size": 128},
    **{"num_hidden_layers": 2, "num_attention_heads": 2},
}
HEADS = {"Bert": "ForMaskedLM", "Bart": "ForConditionalGeneration"}
WAYS = ("compressed before", "compressed after", "quantize_saved")
TOKENS = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))


def errors_of_model(name: str, how: str) -> dict[Any, dict[str, float]]:
    """Of the gradients in each of WAYS, with 8 bits and "exact", beside those of the whole model without memkern."""
    import transformers

    torch.set_num_threads(1)
    family, options = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    config.use_cache = False

    def trained(bits: Any, way: str | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = getattr(transformers, family + HEADS.get(family, "ForCausalLM"))(config)
        if way == "compressed before":
            memkern.compress(model, saved_bits=bits)
        if way is not None:
            wrapped(model, [m for m in model.modules() if type(m).__name__.endswith("Layer")], how)
        if way == "compressed after":
            memkern.compress(model, saved_bits=bits)
        context = memkern.quantize_saved(bits) if way == "quantize_saved" else contextlib.nullcontext()
        with context:
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        return whole_gradients(model, how)

    expected = trained(None, None)
    return {bits: {way: error(trained(bits, way), expected) for way in WAYS} for bits in ERRORS}


def documented_error(name: str, bits: Any) -> float:
    """In the table of docs/saved-tensors.md."""
    lines = (ROOT / "docs/saved-tensors.md").read_text().splitlines()
    start = lines.index("| gradients under `fully_shard` | " + " | ".join(MODELS) + " |")
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines[start : start + 4]]
    (row,) = [row for row in rows if row[0] == {8: "8 bits", "exact": '"exact"'}[bits]]
    return float(row[rows[0].index(name)])


@pytest.mark.feature(
    "transformers", "`compress(saved_bits=...)` of BERT, BART, Llama, Qwen3, Mixtral under `fully_shard`"
)
@pytest.mark.full
@pytest.mark.parametrize("world", first_full([2, 1]))
@pytest.mark.parametrize("how", FULLY_SHARD)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_sharded_models_of_transformers(ranks: Ranks, name: str, how: str, world: int) -> None:
    pytest.importorskip("transformers")
    for found in ranks(world, errors_of_model, name, how):
        for bits, most in ERRORS.items():
            documented = pytest.approx(documented_error(name, bits), rel=0.1, abs=1e-6)
            assert found[bits] == dict.fromkeys(WAYS, documented)
            assert max(found[bits].values()) < most
