"""A loop of your own: 8-bit states, 3-bit activations, a schedule, a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import memkern

TEXT = torch.tensor(list(Path(__file__).read_bytes()))  # bytes are the tokens


def batch(rows: int, length: int) -> torch.Tensor:
    starts = torch.randint(len(TEXT) - length, (rows,)).tolist()
    return torch.stack([TEXT[i : i + length] for i in starts])


def main(
    steps: int = 200, width: int = 256, layers: int = 4, length: int = 128, out: Path = Path("out/plain.pt")
) -> list[float]:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=length, n_embd=width, n_layer=layers, n_head=width // 32)
    model = GPT2LMHeadModel(config)
    print(memkern.compress(model))

    groups = memkern.optim.param_groups(model, weight_decay=0.1)
    optimizer = memkern.optim.AdamW8bit(groups, lr=1e-3, max_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    losses = []
    for step in range(steps):
        tokens = batch(8, length)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}")
    print(f"optimizer states: {memkern.memory.optimizer_bytes(optimizer):,} bytes")

    out.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, out)
    saved = torch.load(out, weights_only=True)
    optimizer.load_state_dict(saved["optimizer"])  # the next step has the bits that it would have had
    return losses


if __name__ == "__main__":
    main()
