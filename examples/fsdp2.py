"""FSDP2: torchrun --nproc-per-node 2 examples/fsdp2.py. Each rank has the states of its shard, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

import memkern

TEXT = torch.tensor(list(Path(__file__).read_bytes()))  # bytes are the tokens


def main(steps: int = 100, width: int = 256, layers: int = 4, length: int = 128) -> list[float]:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # the same weights on every rank
    config = GPT2Config(vocab_size=256, n_positions=length, n_embd=width, n_layer=layers, n_head=width // 32)
    model = GPT2LMHeadModel(config).to(device)
    memkern.compress(model)  # before sharding
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    optimizer = memkern.optim.AdamW8bit(model.parameters(), lr=1e-3, max_grad_norm=1.0)  # after sharding

    torch.manual_seed(1 + dist.get_rank())  # other data on every rank
    windows, losses = TEXT.unfold(0, length, 1), []
    for step in range(steps):
        tokens = windows[torch.randint(len(windows), (8,))].to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.3f}")
    state = get_optimizer_state_dict(model, optimizer)  # for torch.distributed.checkpoint.save
    if dist.get_rank() == 0:
        print(f"{len(state['state'])} parameters have states")
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
