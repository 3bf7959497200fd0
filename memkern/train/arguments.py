"""The arguments of ``python -m memkern train``: the fields of TrainConfig, and where to read and write."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .config import (
    AMP,
    BASELINES,
    CHECKPOINTING,
    DTYPES,
    GRADIENT_ROUNDING,
    MASTER_WEIGHTS,
    MODELS,
    OPTIMIZERS,
    PARALLEL,
    SAVED_BITS,
    WARMUP_FROM,
    TrainConfig,
)
from .large_batch import LR_RULES

DESCRIPTION = """\
Trains a byte-level GPT, or a model of transformers, on text, JSONL or CSV: by default the running Python's own
standard library, without its tests. The last tenth of every file of text, and every tenth row of a table, is for
validation. An option that is not given has its default, or with --resume the value that the resumed run began with.
Several processes: torchrun --nproc-per-node 2 -m memkern train ..."""

DEFAULTS = TrainConfig()


def add(group: Any, name: str, text: str, default: str | None = None, **options: Any) -> None:
    """An argument for a field of TrainConfig; absent from the namespace where it is not given."""
    shown = default or getattr(DEFAULTS, name)
    options.setdefault("help", f"{text} (default: {shown})")
    group.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, **options)


def flag(group: Any, name: str, text: str) -> None:
    add(group, name, "", action="store_true", help=text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All of them."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_model(parser.add_argument_group("data and model"))
    add_training(parser.add_argument_group("training"))
    add_techniques(parser.add_argument_group("techniques that save memory"))
    add_rates(parser.add_argument_group("rates and large batches"))
    add_files(parser.add_argument_group("files and comparison"))


def add_model(group: Any) -> None:
    text = "files, and folders of text files, to train on: text, .jsonl, .csv, .tsv, .parquet"
    add(group, "data", text, "Python's standard library", nargs="+", action="extend", metavar="PATH")
    sizes = "; ".join(f"{name}: {'x'.join(map(str, shape))}" for name, shape in MODELS.items())
    text = (
        f"byte-level GPT of layers x heads x width, {sizes}; or transformers' model in a folder or on the Hub"
    )
    add(group, "model", text, metavar="NAME|FOLDER")
    flag(group, "from_config", "random weights in place of those of the folder or the Hub")
    flag(
        group, "bytes", "UTF-8 bytes as tokens; by default the model's tokenizer, or one trained on the text"
    )
    add(
        group,
        "text_field",
        "field of .jsonl, .csv, .tsv and .parquet files with the text",
        "text",
        metavar="NAME",
    )
    text = "train a sequence classifier to find this field of .jsonl, .csv, .tsv and .parquet files"
    add(group, "label_field", text, "none; label, for a folder that holds a classifier", metavar="NAME")
    add(group, "dropout", "all dropout rates of the model", "the model's own", type=float, metavar="X")
    add(group, "layers", "number of a byte-level GPT's blocks", "the model's", type=int, metavar="N")
    add(group, "heads", "its attention heads", "the model's", type=int, metavar="N")
    add(group, "width", "the size of its residual stream", "the model's", type=int, metavar="N")
    text = "tokens in a window; of texts with labels the most that are taken"
    add(group, "seq_len", text, type=int, metavar="N")


def add_training(group: Any) -> None:
    add(group, "optimizer", "one of memkern.optim or torch.optim (torch-)", choices=list(OPTIMIZERS))
    add(group, "steps", "optimizer steps", type=int, metavar="N")
    add(group, "epochs", "passes over the text, in place of --steps", "none", type=float, metavar="X")
    add(group, "batch_size", "windows in a micro-batch", type=int, metavar="N")
    add(group, "accumulate", "micro-batches in a step", type=int, metavar="N")
    add(group, "seed", "initial values and batches", type=int, metavar="N")
    add(group, "device", "cpu, cuda or cuda:N", "cuda if there is one", metavar="NAME")
    add(group, "threads", "CPU threads", "torch's choice", type=int, metavar="N")
    add(group, "workers", "processes that prepare batches", type=int, metavar="N")
    add(group, "parallel", "of several processes: DDP, or FSDP2's shards", choices=list(PARALLEL))
    add(group, "eval_every", "steps between validations", type=int, metavar="N")
    add(group, "eval_tokens", "tokens of validation text", type=int, metavar="N")


def add_techniques(group: Any) -> None:
    text = "let the planner choose among the following what fits in this memory, such as 12GiB"
    group.add_argument("--fit", metavar="SIZE", help=text)
    text = "save the inputs of blocks, or of every sqrt(L)-th of L blocks, and recompute the rest in the backward pass"
    add(group, "checkpointing", text, choices=list(CHECKPOINTING))
    group.add_argument(
        "--checkpoint-activations",
        dest="checkpointing",
        action="store_const",
        const="blocks",
        default=argparse.SUPPRESS,
        help="the same as --checkpointing blocks",
    )
    add(group, "amp", "autocast type; fp16 scales the loss", choices=list(AMP))
    add(group, "dtype", "type of the weights, gradients and activations", choices=list(DTYPES))
    text = "beside bf16 weights: a copy in fp32, or the rounding errors in 16 or 8 bits"
    add(group, "master_weights", text, choices=list(MASTER_WEIGHTS))
    text = "of bf16 gradients that are added up over micro-batches; stochastic loses nothing on the average"
    add(group, "gradient_rounding", text, choices=list(GRADIENT_ROUNDING))
    text = "bits per element that activations save for the backward pass, 1 to 4"
    add(group, "activation_bits", text, "torch's activations", type=int, metavar="N")
    text = "share of the tokens that linear layers save for their weights' gradients"
    add(group, "linear_keep", text, "all", type=float, metavar="X")
    add(
        group,
        "saved_bits",
        "all that is saved for the backward pass: once, in 8 bits",
        choices=list(SAVED_BITS),
    )
    text = "classes whose logits are in memory at a time"
    add(group, "loss_chunk", text, "all", type=int, metavar="N")
    flag(group, "step_in_backward", "update each parameter as soon as it has its gradient, and free that")
    flag(group, "offload", "keep the optimizer's states in host memory, and step there")


def add_rates(group: Any) -> None:
    rates = "1e-3, Lion 1e-4, LAMB 1e-2, LARS 3e-2; a model of transformers 0.3 of it from random weights, else 0.05"
    add(group, "lr", "peak learning rate", rates, type=float, metavar="X")
    decays = "AdamW and LAMB 0.1, Adam 0, Lion 1, LARS 1e-4"
    add(group, "weight_decay", "decay of matrices", decays, type=float, metavar="X")
    text = "largest global gradient norm, 0 for none"
    add(group, "clip", text, "1, with --step-in-backward 0", type=float, metavar="X")
    text = "micro-batches in a step for each of --accumulate; the learning rate is scaled by --lr-rule"
    add(group, "batch_factor", text, "the number of processes", type=int, metavar="N")
    add(group, "lr_rule", "what the learning rate is multiplied by for it", choices=list(LR_RULES))
    add(group, "warmup", "steps of linear warm-up", "a tenth, at most 100", type=int, metavar="N")
    add(group, "warmup_epochs", "epochs of it, in place of --warmup", "none", type=float, metavar="X")
    text = "the rate it begins with: zero, or base, that before --lr-rule scaled it"
    add(group, "warmup_from", text, choices=list(WARMUP_FROM))


def add_files(group: Any) -> None:
    text = "no training: the validation loss of the model as it is"
    group.add_argument("--evaluate", action="store_true", help=text)
    text = (
        "with --evaluate, by accelerate: weights are in host memory but for those of the layer that runs, or while the "
        "model does not run (default: none)"
    )
    choices = ["none", "layers", "model"]
    group.add_argument("--weights-on-host", choices=choices, default="none", help=text)
    pairs = ", ".join(f"{ours} with {baseline}" for ours, baseline in BASELINES.items())
    group.add_argument("--compare", action="store_true", help=f"train the baseline beside it: {pairs}")
    text = "folder for results.json, losses.png and memory.png"
    group.add_argument("--out", type=Path, metavar="DIR", help=text)
    text = "new folder for the trained model of transformers and its tokenizer"
    group.add_argument("--export", type=Path, metavar="DIR", help=text)
    text = "checkpoint to write, replaced as a whole, at Ctrl-C too (default: none, or that of --resume)"
    group.add_argument("--save", type=Path, metavar="PATH", help=text)
    add(group, "save_every", "steps between checkpoints", type=int, metavar="N")
    group.add_argument("--resume", type=Path, metavar="PATH", help="checkpoint to continue, bit for bit")
