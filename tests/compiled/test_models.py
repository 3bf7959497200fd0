"""Whole models of transformers: bytes in codes over eager torch's, and the error of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memkern import memory
from tests.support.partitioned import backend

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
# Over eager torch's bytes, at most. Two norms of GPT-NeoX share what is normalized; its q, k and v are of one product.
SHARES = {"Llama": 0.14, "GPTNeoX": 0.15, "Phi": 0.13, "Gemma2": 0.27, "Qwen3": 0.15}


def step(model: torch.nn.Module, call: Any) -> tuple[int, torch.Tensor]:
    """Saved bytes, and all gradients as one vector."""
    tokens = torch.randint(0, 300, (2, 128), generator=torch.Generator().manual_seed(1))
    found: list[torch.Tensor] = []
    saved = memory.saved_bytes(
        lambda: found.append(call(input_ids=tokens, labels=tokens, use_cache=False).loss), model, tokens
    )
    model.zero_grad()
    found[0].backward()
    return saved, torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


@pytest.mark.full
@pytest.mark.parametrize("name", SHARES)
def test_bytes_and_gradients(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    more = {"head_dim": 32, "num_key_value_heads": 2} if name in ("Gemma2", "Qwen3") else {}
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES, **more))
    eager, expected = step(model, model)
    torch._dynamo.reset()
    coded, found = step(model, torch.compile(model, backend=backend(8)))
    assert coded / eager < SHARES[name]
    assert (found - expected).norm() < 0.02 * expected.norm()
