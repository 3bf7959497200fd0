"""accelerate's loop: accumulation, clipping and a schedule; `accelerate launch` runs it in several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

import memkern

TEXT = torch.tensor(list(Path(__file__).read_bytes()))  # bytes are the tokens


def main(steps: int = 200, width: int = 256, layers: int = 4, length: int = 128, accumulate: int = 2) -> list[float]:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=length, n_embd=width, n_layer=layers, n_head=width // 32)
    model = GPT2LMHeadModel(config)
    memkern.compress(model)  # before prepare, which may wrap the model
    optimizer = memkern.optim.AdamW8bit(memkern.optim.param_groups(model, weight_decay=0.1), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    windows: Any = TEXT.unfold(0, length, 1)  # rows that DataLoader indexes
    sampler = torch.utils.data.RandomSampler(windows, replacement=True, num_samples=8 * steps * accumulate)
    data = torch.utils.data.DataLoader(windows, batch_size=8, sampler=sampler)

    accelerator = Accelerator(gradient_accumulation_steps=accumulate, cpu=not torch.cuda.is_available())
    model, optimizer, scheduler, data = accelerator.prepare(model, optimizer, scheduler, data)
    losses: list[float] = []
    for tokens in data:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
