"""Lightning: the module is compressed where it is made, and configure_optimizers returns memkern's optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from transformers import GPT2Config, GPT2LMHeadModel

import memkern

TEXT = torch.tensor(list(Path(__file__).read_bytes()))  # bytes are the tokens


class LanguageModel(LightningModule):
    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        sizes = {"n_embd": width, "n_layer": layers, "n_head": width // 32, "n_positions": length}
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=256, **sizes))
        memkern.compress(self.model)
        self.losses: list[float] = []

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        groups = memkern.optim.param_groups(self, weight_decay=0.1)
        return memkern.optim.AdamW8bit(groups, lr=1e-3)


def main(steps: int = 200, width: int = 256, layers: int = 4, length: int = 128) -> list[float]:
    torch.manual_seed(0)
    module = LanguageModel(width, layers, length)
    windows: Any = TEXT.unfold(0, length, 1)  # rows that DataLoader indexes
    trainer = Trainer(
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        default_root_dir="out/lightning",
    )
    trainer.fit(module, torch.utils.data.DataLoader(windows, batch_size=8, shuffle=True))
    return module.losses


if __name__ == "__main__":
    main()
