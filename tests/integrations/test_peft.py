"""PEFT's LoRA adapters on models after memkern.compress, with 8-bit optimizer states."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memkern
from memkern import memory, optim
from tests.integrations.models import gpt2, tokens

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.full


def adapted(model: Any, r: int = 8) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=r, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, lora_dropout=0.0)
    return peft.get_peft_model(model, config)


def losses(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    values = []
    for seed in range(steps):
        rows = tokens(4, seed % 2)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values


@pytest.mark.feature("peft", "LoRA on GPT-2 after `compress(linear=)`")
def test_compressed_linear_layers_take_adapters() -> None:
    plain, compressed = gpt2(), gpt2()
    memkern.compress(compressed, activations=None, linear={"share": 0.5, "min_tokens": 0})
    plain, compressed = adapted(plain), adapted(compressed)
    # Frozen weights need no gradient: their layers are torch's, and so is every gradient.
    runs = [
        losses(m, optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2), 4) for m in (plain, compressed)
    ]
    assert runs[0] == runs[1]
    assert runs[0][2] < runs[0][0]
    merged = compressed.merge_and_unload()
    rows = tokens(2)
    torch.testing.assert_close(merged(rows).logits, plain(rows).logits)
    assert memkern.restore(merged) > 0


@pytest.mark.feature("peft", "LoRA adapters with 8-bit states (group option `min_8bit_size`)")
# bytes of two moments: fp32, or 8-bit codes with an fp32 scale per block of 128
@pytest.mark.parametrize(("min_8bit_size", "bytes_each"), [(4096, 8), (512, 2 + 8 / 128)])
def test_adapters_states_take_8_bytes_or_codes(min_8bit_size: int, bytes_each: float) -> None:
    model = adapted(gpt2(), r=8)
    adapters = [p for p in model.parameters() if p.requires_grad]
    assert {p.numel() for p in adapters} == {512, 1536, 2048}
    optimizer = optim.AdamW8bit([{"params": adapters, "min_8bit_size": min_8bit_size}], lr=1e-2)
    values = losses(model, optimizer, 6)
    assert values[-2] < values[0]
    steps = 4 * len(adapters)
    assert memory.optimizer_bytes(optimizer) == bytes_each * sum(p.numel() for p in adapters) + steps
