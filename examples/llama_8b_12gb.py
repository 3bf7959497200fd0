"""Llama-3.1-8B, all of its 8 billion parameters, on a card of 12 GB beside 64 GB of the host; random weights.

With --tiny a small Llama, in seconds, on a CPU too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import memkern

TEXT = torch.tensor(list(Path(__file__).read_bytes() * 8))  # bytes are the tokens
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0}  # fmt: skip
TINY = {"hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": 4, "vocab_size": 256}
TECHNIQUES = memkern.Techniques(precision="bf16", master_weights="bf16+8", state_bits=8, checkpointing="blocks",
                                step_in_backward=True, weights_on_host="layers")  # fmt: skip


class WithLoss(torch.nn.Module):
    """A model with its loss in chunks of logits. The loss reads weights, so it is inside of what is streamed."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.loss = model, memkern.nn.LinearCrossEntropy.from_linear(model.lm_head)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.model.model(tokens, use_cache=False).last_hidden_state
        return self.loss(hidden[:, :-1], tokens[:, 1:])


def main(steps: int = 5, length: int = 8192, sizes: dict[str, Any] = LLAMA_8B) -> list[float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)  # no copy of the weights in fp32 is made
    model = WithLoss(LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=length)))
    torch.set_default_dtype(torch.float32)
    memkern.apply(model, TECHNIQUES)  # a block's weights are on the device while it runs
    optimizer = memkern.make_optimizer(model.parameters(), TECHNIQUES, lr=0.1 / sizes["hidden_size"])
    losses = []
    for step in range(steps):
        start = int(torch.randint(len(TEXT) - length, ()))
        loss = model(TEXT[None, start : start + length].to(device))
        loss.backward()  # takes the steps, block by block
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if device == "cuda" else ""
        print(f"step {step}: loss {losses[-1]:.3f}{peak}")
    return losses


if __name__ == "__main__":
    main(20, 128, TINY) if "--tiny" in sys.argv else main()
