"""GPT-2-XL, 1.56 billion parameters with random weights, one sequence of 1,024 tokens at a time, on a CPU.

The same with the planner's choice, progress, validation and checkpoints:

  python -m memkern train --model gpt2-xl --from-config --bytes --fit 9GiB --batch-size 1 --seq-len 1024 --device cpu
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import memkern

TEXT = torch.tensor(list(Path(__file__).read_bytes()))  # bytes are the tokens
XL = {"n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024}


def main(steps: int = 5, sizes: dict[str, Any] = XL) -> list[float]:
    torch.manual_seed(0)
    dropout = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    torch.set_default_dtype(torch.bfloat16)  # no copy of the weights in fp32 is made
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, use_cache=False))
    torch.set_default_dtype(torch.float32)

    memkern.checkpoint_blocks(model)  # each block saves its input, and runs again
    memkern.compress(model)  # while it does, its GELU saves 3 bits
    # In chunks of classes: all logits never exist at once.
    loss_fn = memkern.nn.LinearCrossEntropy.from_linear(model.lm_head)
    optimizer = memkern.optim.StepInBackward(  # each gradient is stepped and freed as it comes
        memkern.optim.AdamW8bit, model.parameters(), lr=1e-4, master_weights="bf16+8"
    )
    losses = []
    for step in range(steps):
        start = int(torch.randint(max(1, len(TEXT) - sizes["n_positions"] - 1), ()))
        tokens = TEXT[start : start + sizes["n_positions"]][None]
        hidden = model.transformer(input_ids=tokens).last_hidden_state
        loss = loss_fn(hidden[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"step {step}: loss {losses[-1]:.3f}, peak of the process {peak:.2f} GiB")
    return losses


if __name__ == "__main__":
    main()
