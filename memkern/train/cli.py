"""``python -m memkern train``: its arguments, and the run from checks to files."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ..techniques.flags import add_flags
from ..techniques.options import OptionError, Techniques, at_least, not_allowed, refused
from . import checkpoint, report
from .config import DATA, FILES, TECHNIQUES, TRAINING, TrainConfig
from .distributed import gathered, joined, rank, world
from .fit import fit
from .interrupt import Saver, deferred, say
from .loop import Trainer, load, resolve_device, run

DESCRIPTION = """\
Trains a byte-level GPT, or a model of transformers, on text or JSON lines: by default the running Python's own standard
library, without its tests. The last tenth of every file of text, and every tenth row of JSON lines, is for validation.
An option that is not given has its default, or with --resume the value that the resumed run began with.
Several processes: torchrun --nproc-per-node 2 -m memkern train ..."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the fields of TrainConfig and Techniques, the files, and the modes that replace a run."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    defaults = TrainConfig()
    groups = {name: parser.add_argument_group(name) for name in (DATA, TRAINING, TECHNIQUES, FILES)}
    text = "windows of an optimizer step, for each of --batch-factor: --micro-batch times --accumulation"
    groups[TRAINING].add_argument("--batch-size", type=int, metavar="N", help=text)
    text = "let the planner choose among the following what fits in this memory, such as 12GiB"
    groups[TECHNIQUES].add_argument("--fit", metavar="SIZE", help=text)
    add_flags(groups[TECHNIQUES], Techniques, dataclasses.fields(Techniques), defaults)
    for heading, group in groups.items():
        fields = [field for field in dataclasses.fields(TrainConfig) if field.metadata["group"] == heading]
        add_flags(group, TrainConfig, fields, defaults)
    add = groups[FILES].add_argument
    text = "train the baseline beside it: torch's optimizer (32-bit states where it has none), fp32 weights and layers"
    add("--compare", action="store_true", help=text)
    add("--out", type=Path, metavar="DIR", help="folder for results.json and losses.png")
    text = "new folder for the trained model of transformers and its tokenizer"
    add("--export", type=Path, metavar="DIR", help=text)
    text = "checkpoint to write, replaced as a whole, at Ctrl-C too (default: none, or that of --resume)"
    add("--save", type=Path, metavar="PATH", help=text)
    add("--resume", type=Path, metavar="PATH", help="checkpoint to continue, bit for bit")


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of TrainConfig and Techniques that are given; --batch-size as micro_batch and accumulation."""
    given = {field.name: vars(args)[field.name] for field in dataclasses.fields(TrainConfig) if field.name in args}
    if "data" in given:
        given["data"] = tuple(given["data"])
    if given.get("optimizer", "").startswith("torch-"):
        given.setdefault("state_bits", 32)  # torch's optimizers have no other
    if args.batch_size is not None:
        given |= micro_batches(args.batch_size, given.get("micro_batch"), given.get("accumulation"))
    return given


def micro_batches(batch_size: int, micro_batch: int | None, accumulation: int | None) -> dict[str, int]:
    """A batch in micro-batches: as large as given, or as many as given, by default one."""
    for name, value in {"batch_size": batch_size, "micro_batch": micro_batch, "accumulation": accumulation}.items():
        if value is not None and value < 1:
            raise not_allowed(name, value, at_least(1).words)
    size = micro_batch or max(1, batch_size // (accumulation or 1))
    count = accumulation or max(1, batch_size // size)
    if size * count != batch_size:
        allowed = f"--micro-batch times --accumulation, such as {size} times {count}"
        raise OptionError("batch_size", f"{batch_size} given; allowed: {allowed}")
    return {"micro_batch": size, "accumulation": count}


def check_modes(args: argparse.Namespace, config: TrainConfig) -> None:
    """Raises OptionError for arguments that exclude each other, SystemExit for a package that is missing."""
    for name, others in (("compare", ("save", "resume", "export")), ("fit", ("compare", "resume"))):
        if getattr(args, name) and (given := next((other for other in others if getattr(args, other)), None)):
            raise OptionError(name, f"given with --{given}; allowed: without --{', --'.join(others)}")
        if getattr(args, name) and world() > 1:
            raise OptionError(name, f"given in {world()} processes; allowed in one")
    if args.export and config.is_preset:
        raise OptionError("export", f"given with --model {config.model}; allowed with models of transformers")
    for package, is_needed in (("matplotlib", args.out), ("transformers", not config.is_preset)):
        if is_needed and importlib.util.find_spec(package) is None:
            raise SystemExit(f"memkern train needs {package}, which the extra memkern[train] brings")


def main(args: argparse.Namespace) -> None:
    """Checks everything, trains, reports.

    Raises OptionError before anything is written, SystemExit at Ctrl-C or SIGTERM (128 and the signal's number) where a
    checkpoint was written, and with a line after the results where a checkpoint or a result could not be.
    """
    state = checkpoint.load(args.resume) if args.resume else None
    with joined():
        base = TrainConfig(batch_factor=world()) if state is None else TrainConfig(**state["config"])
        config, save = base.replace(**given_options(args)), args.save or args.resume
        check_modes(args, config)
        if save:
            checkpoint.check_save("save" if args.save else "resume", save, args.out)
        corpus, plan = load(config), None
        if args.fit:
            config, plan = fit(config, args.fit, vars(args), resolve_device(config).type)
        configs = [config.baseline(), config] if args.compare else [config]
        trainers = [Trainer(each, corpus) for each in configs]
        if state:
            with refused("resume", f"{str(args.resume)!r} given, which cannot be continued"):
                trainers[0].load_state_dict(state)
            state = None  # frees it: the model and the optimizer have copies
        for name in ("out", "export") if rank() == 0 else ():
            if folder := getattr(args, name):
                checkpoint.check_folder(name, folder, empty=name == "export")
        if rank() == 0:
            say(corpus.description())
        show = report.progress(trainers) if rank() == 0 else lambda trainer: None
        with deferred() if save else nullcontext(list[int]()) as signals:
            saver = Saver(save, signals) if save else None

            def on_step(trainer: Trainer) -> None:
                if saver:  # before anything is shown
                    saver(trainer)
                show(trainer)

            try:
                results = run(trainers, on_step)
            except FloatingPointError as error:
                raise SystemExit(f"memkern train: {error}; try a lower --lr, or --clip") from error
        weights = trainers[-1].weights() if args.export else {}
        failures = [f"the last checkpoint could not be written: {saver.failure}"] if saver and saver.failure else []
        if rank() == 0:
            say(report.text(trainers, results))
            try:
                if args.export:
                    model: Any = trainers[-1].model
                    model.save_pretrained(args.export, state_dict=weights)
                    if corpus.tokenizer is not None:
                        corpus.tokenizer.save_pretrained(args.export)
                if args.out:
                    report.write(args.out, trainers, results, plan)
            except Exception as error:  # safetensors' SafetensorError is no OSError
                failures.append(f"results could not be written: {str(error).partition(chr(10))[0]}")
        if failures := gathered(failures)[0]:
            raise SystemExit(f"memkern train: {'; '.join(failures)}")
