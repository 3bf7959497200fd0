"""PEFT: LoRA on a compressed model, with 8-bit states for the adapters."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import memkern

TEXT = torch.tensor(list(Path(__file__).read_bytes()))  # bytes are the tokens


def main(steps: int = 100, width: int = 256, layers: int = 4, length: int = 128, rank: int = 8) -> list[float]:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=length, n_embd=width, n_layer=layers, n_head=width // 32)
    base = GPT2LMHeadModel(config)  # put GPT2LMHeadModel.from_pretrained("gpt2") here
    memkern.compress(base)
    lora = LoraConfig(r=rank, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    model = get_peft_model(base, lora)

    adapters = [p for p in model.parameters() if p.requires_grad]
    group = {"params": adapters, "min_8bit_size": 512}  # adapters are smaller than the default, 4,096 elements
    optimizer = memkern.optim.AdamW8bit([group], lr=1e-2)
    windows, losses = TEXT.unfold(0, length, 1), []
    for step in range(steps):
        tokens = windows[torch.randint(len(windows), (8,))]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}")
    per_parameter = memkern.memory.optimizer_bytes(optimizer) / sum(p.numel() for p in adapters)
    print(f"optimizer states: {per_parameter:.2f} bytes per parameter of the adapters")
    return losses


if __name__ == "__main__":
    main()
