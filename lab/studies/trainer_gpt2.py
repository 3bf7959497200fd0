"""GPT-2 in transformers' Trainer, memkern beside adamw_torch, loss by loss.

GPT-2's configuration of 124 M parameters with random weights, on the CPU: the same rows of text (bytes of Python's own
argparse) in the same order, once with ``optim="adamw_torch"`` and once with memkern's pair (AdamW8bit) and callback
(3-bit GELU). Also recorded: the bytes of the optimizer states, and of what a forward pass saves for the backward pass.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, report
from lab.studies import study
from memkern.memory import optimizer_bytes

COLUMNS = (
    *report.PROVENANCE,
    *("transformers", "accelerate", "way", "step", "loss", "loss_over_torch", "state_bytes", "saved_bytes"),
)
TOKENS, BATCH = 16, 2


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    data = torch.tensor([*Path(argparse.__file__).read_bytes()[: count * TOKENS]]).view(count, TOKENS)
    return [{"input_ids": row, "labels": row} for row in data]


def losses(memkern: bool, steps: int, config: dict[str, Any]) -> tuple[list[float], int, Any]:
    """The loss of each step, the bytes of the states, and the callback's report."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    from memkern.integrations.transformers import CompressCallback, optimizer_cls_and_kwargs

    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**config))
    data = rows(steps * BATCH)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            optim="adamw_torch",
            learning_rate=3e-4,
            weight_decay=0.1,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        example = {name: torch.stack([row[name] for row in data[:BATCH]]) for name in data[0]}
        callback = CompressCallback(example=example)
        options: dict[str, Any] = {}
        if memkern:
            options = {"optimizer_cls_and_kwargs": optimizer_cls_and_kwargs(args), "callbacks": [callback]}
        trainer = Trainer(model, args, train_dataset=data, **options)
        trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return found, optimizer_bytes(trainer.optimizer), callback.report


def results(steps: int, **config: Any) -> list[report.Row]:
    import accelerate
    import transformers

    provenance = machine.provenance("cpu") | {
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
    }
    theirs, their_states, _ = losses(False, steps, config)
    gc.collect()
    ours, our_states, compressed = losses(True, steps, config)
    found = []
    for way, values, states, saved in (
        ("adamw_torch", theirs, their_states, compressed.before.total),
        ("AdamW8bit, 3-bit GELU", ours, our_states, compressed.after.total),
    ):
        for i, (loss, reference) in enumerate(zip(values, theirs, strict=True), 1):
            texts = (way, str(i), f"{loss:.4f}", f"{loss / reference:.5f}", str(states), str(saved))
            found.append(study.row(provenance, COLUMNS, texts))
    return found


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("trainer_gpt2", __doc__)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)
    found = results(args.steps)
    path = args.out / "trainer-gpt2.csv"
    report.append(path, found, COLUMNS)
    for row in found:
        print(*(row[name] for name in COLUMNS[-6:]), sep="  ")
    print(path)


if __name__ == "__main__":
    main()
