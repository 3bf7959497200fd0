"""The arguments of ``python -m memkern train``: the fields of TrainConfig and Techniques, and its files."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from ..flags import add_flags, flag
from ..options import OptionError, Techniques, at_least, not_allowed
from .config import DATA, FILES, RATES_AND_BATCHES, TECHNIQUES, TRAINING, TrainConfig

DESCRIPTION = """\
Trains a byte-level GPT, or a model of transformers, on text, JSONL or CSV: by default the running Python's own
standard library, without its tests. The last tenth of every file of text, and every tenth row of a table, is for
validation. An option that is not given has its default, or with --resume the value that the resumed run began with.
Several processes: torchrun --nproc-per-node 2 -m memkern train ..."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all of them."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    defaults = TrainConfig()
    for heading in (DATA, TRAINING, TECHNIQUES, RATES_AND_BATCHES, FILES):
        group = parser.add_argument_group(heading)
        if heading == TRAINING:
            text = "windows of an optimizer step, for each of --batch-factor: --micro-batch times --accumulation"
            group.add_argument("--batch-size", type=int, metavar="N", help=text)
        if heading == TECHNIQUES:
            text = "let the planner choose among the following what fits in this memory, such as 12GiB"
            group.add_argument("--fit", metavar="SIZE", help=text)
            more = {"weights_on_host": ("model",)}  # with --evaluate
            add_flags(group, Techniques, dataclasses.fields(Techniques), defaults.techniques, more)
        fields = [f for f in dataclasses.fields(TrainConfig) if f.metadata.get("group") == heading]
        add_flags(group, TrainConfig, fields, defaults)
        if heading == FILES:
            add_files(group)


def add_files(group: Any) -> None:
    """Adds the files that are read and written, and the modes that replace a run."""
    text = (
        "no training: the validation loss of the model as it is; --weights-on-host is accelerate's then: layers, or "
        "model, all weights on the device while the model runs"
    )
    group.add_argument("--evaluate", action="store_true", help=text)
    text = (
        "train the baseline beside it: torch's optimizer, or 32-bit states where torch has none, with fp32 weights and "
        "torch's layers"
    )
    group.add_argument("--compare", action="store_true", help=text)
    text = "folder for results.json, losses.png and memory.png"
    group.add_argument("--out", type=Path, metavar="DIR", help=text)
    text = "new folder for the trained model of transformers and its tokenizer"
    group.add_argument("--export", type=Path, metavar="DIR", help=text)
    text = "checkpoint to write, replaced as a whole, at Ctrl-C too (default: none, or that of --resume)"
    group.add_argument("--save", type=Path, metavar="PATH", help=text)
    group.add_argument("--resume", type=Path, metavar="PATH", help="checkpoint to continue, bit for bit")


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of TrainConfig and Techniques that are given; --batch-size as micro_batch and accumulation.

    Raises OptionError for options that exclude each other.
    """
    names = {field.name for cls in (TrainConfig, Techniques) for field in dataclasses.fields(cls)}
    given = {name: value for name, value in vars(args).items() if name in names}
    if "data" in given:
        given["data"] = tuple(given["data"])
    for name, other in (("epochs", "steps"), ("warmup_epochs", "warmup")):
        if name in given and other in given:
            raise OptionError(name, f"given with {flag(other)}; allowed: one of the two")
        if other in given:
            given[name] = None
    if given.get("optimizer", "").startswith("torch-"):
        given.setdefault("state_bits", 32)  # torch's have no other
    if args.batch_size is not None:
        given |= micro_batches(args.batch_size, given.get("micro_batch"), given.get("accumulation"))
    return given


def micro_batches(batch_size: int, micro_batch: int | None, accumulation: int | None) -> dict[str, int]:
    """A batch in micro-batches: as large as given, or as many as given, by default one."""
    numbers = {"batch_size": batch_size, "micro_batch": micro_batch, "accumulation": accumulation}
    given = {name: value for name, value in numbers.items() if value is not None}
    for name, value in given.items():
        if value < 1:
            raise not_allowed(name, value, at_least(1).words)
    size = micro_batch or max(1, batch_size // (accumulation or 1))
    count = accumulation or max(1, batch_size // size)
    if size * count != batch_size:
        del given["batch_size"]
        words = " and ".join(f"{flag(name)} {value}" for name, value in given.items())
        allowed = size * count if len(given) == 2 else f"multiples of {micro_batch or accumulation}"
        raise OptionError("batch_size", f"{batch_size} given with {words}; allowed: {allowed}")
    return {"micro_batch": size, "accumulation": count}
