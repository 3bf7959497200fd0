"""Whole models of transformers compiled with 8 bits: saved bytes and errors of gradients stay below bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.helpers import first_full
from tests.support.partitioned import backend, relative_error, step

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
# The largest share of eager torch's saved bytes. In GPT-NeoX two norms have one input, and one product makes q, k, v.
SHARES = {"GPTNeoX": 0.15, "Gemma2": 0.27, "Llama": 0.14, "Phi": 0.13, "Qwen3": 0.15}


@pytest.mark.full
@pytest.mark.parametrize("name", first_full(SHARES, 2))
def test_saved_bytes_and_gradient_errors_stay_below_bounds(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    heads = {"head_dim": 32, "num_key_value_heads": 2} if name in ("Gemma2", "Qwen3") else {}
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES, **heads))
    tokens = torch.randint(0, 300, (2, 128), generator=torch.Generator().manual_seed(1))
    torch._dynamo.reset()
    (eager, expected), (coded, actual) = (
        step(model, tokens, lambda x, call=call: call(input_ids=x, labels=x, use_cache=False).loss)
        for call in (model, torch.compile(model, backend=backend(8)))
    )
    assert coded / eager < SHARES[name]
    assert relative_error(actual, expected) < 0.02
