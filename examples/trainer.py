"""transformers' Trainer with memkern's optimizer and a compressed model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from memkern.integrations.transformers import CompressCallback, optimizer_cls_and_kwargs

TEXT = torch.tensor(list(Path(__file__).read_bytes()))  # bytes are the tokens


def main(
    steps: int = 200, width: int = 256, layers: int = 4, length: int = 128, out: str = "out/trainer"
) -> list[float]:
    config = GPT2Config(vocab_size=256, n_positions=length, n_embd=width, n_layer=layers, n_head=width // 32)
    args = TrainingArguments(
        output_dir=out,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        weight_decay=0.1,
        logging_steps=max(1, steps // 10),
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in TEXT.unfold(0, length, 1)]
    trainer = Trainer(
        GPT2LMHeadModel(config),
        args,
        train_dataset=rows,
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(args, "adamw8bit"),
        callbacks=[CompressCallback()],
    )
    trainer.train()
    log: list[dict[str, Any]] = trainer.state.log_history
    return [entry["loss"] for entry in log if "loss" in entry]


if __name__ == "__main__":
    main()
