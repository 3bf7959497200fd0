"""``python -m memkern train``: its arguments, and the run from checks to files."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..techniques.flags import add_flags, flag
from ..techniques.options import OptionError, Techniques, at_least, not_allowed
from .config import DATA, FILES, RATES_AND_BATCHES, TECHNIQUES, TRAINING, TrainConfig
from .interrupt import Saver, deferred, say

if TYPE_CHECKING:
    from ..planner.outcome import Plan
    from .loop import Source, Trainer

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
    groups = {name: parser.add_argument_group(name) for name in (DATA, TRAINING, TECHNIQUES, RATES_AND_BATCHES, FILES)}

    def add(heading: str, *names: str, **options: Any) -> None:
        groups[heading].add_argument(*names, **options)

    text = "windows of an optimizer step, for each of --batch-factor: --micro-batch times --accumulation"
    add(TRAINING, "--batch-size", type=int, metavar="N", help=text)
    text = "let the planner choose among the following what fits in this memory, such as 12GiB"
    add(TECHNIQUES, "--fit", metavar="SIZE", help=text)
    add_flags(groups[TECHNIQUES], Techniques, dataclasses.fields(Techniques), defaults.techniques)
    for heading, group in groups.items():
        fields = [f for f in dataclasses.fields(TrainConfig) if f.metadata.get("group") == heading]
        add_flags(group, TrainConfig, fields, defaults)
    text = "train the baseline beside it: torch's optimizer (32-bit states where it has none), fp32 weights and layers"
    add(FILES, "--compare", action="store_true", help=text)
    add(FILES, "--out", type=Path, metavar="DIR", help="folder for results.json and losses.png")
    text = "new folder for the trained model of transformers and its tokenizer"
    add(FILES, "--export", type=Path, metavar="DIR", help=text)
    text = "checkpoint to write, replaced as a whole, at Ctrl-C too (default: none, or that of --resume)"
    add(FILES, "--save", type=Path, metavar="PATH", help=text)
    add(FILES, "--resume", type=Path, metavar="PATH", help="checkpoint to continue, bit for bit")


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of TrainConfig and Techniques that are given; --batch-size as micro_batch and accumulation."""
    names = {field.name for cls in (TrainConfig, Techniques) for field in dataclasses.fields(cls)}
    given = {name: value for name, value in vars(args).items() if name in names}
    if "data" in given:
        given["data"] = tuple(given["data"])
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


def check_installed(*names: str) -> None:
    """Exits with the cure where a package of the extra [train] is absent."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    if absent:
        raise SystemExit(f"memkern train needs {' and '.join(absent)}, which the extra memkern[train] brings")


def check_modes(args: argparse.Namespace, config: TrainConfig, world: int) -> None:
    """Raises OptionError for arguments that exclude each other."""
    for name, others in (("compare", ("save", "resume", "export")), ("fit", ("compare", "resume"))):
        if getattr(args, name) and (given := next((other for other in others if getattr(args, other)), None)):
            raise OptionError(name, f"given with --{given}; allowed: without --{', --'.join(others)}")
        if getattr(args, name) and world > 1:
            raise OptionError(name, f"given in {world} processes; allowed in one")
    if args.export and config.is_preset:
        raise OptionError("export", f"given with --model {config.model}; allowed with models of transformers")


def load_state(trainer: Trainer, state: dict[str, Any], path: Path) -> None:
    """Continues the run of a checkpoint. Raises OptionError for one that has its keys and not what belongs to them."""
    try:
        trainer.load_state_dict(state)
    except OptionError:
        raise
    except Exception as error:  # whatever is there, in torch's classes and in memkern's
        why = " ".join(str(error).split()) or "nothing more is known"
        raise OptionError("resume", f"{str(path)!r} cannot be continued: {type(error).__name__}: {why}") from error


def train(trainers: Sequence[Trainer], save_to: Path | None) -> str | None:
    """Runs all to the end, with progress and checkpoints. Says why the last one was not written, where it was not."""
    from .loop import Diverged, run
    from .report import display

    shown = display(trainers) if trainers[0].group.first else nullcontext(lambda trainer: None)
    with shown as show, deferred() if save_to else nullcontext(lambda: 0) as interrupted:
        save = Saver(save_to, interrupted) if save_to else None

        def on_step(trainer: Trainer) -> None:
            if save:  # before anything is shown
                save(trainer)
            show(trainer)

        try:
            run(trainers, on_step)
        except Diverged as error:
            raise SystemExit(f"memkern train: {error}; try a lower --lr, or --clip") from error
    return f"the last checkpoint could not be written: {save.failure}" if save and save.failure else None


def write_results(
    args: argparse.Namespace, source: Source, trainers: Sequence[Trainer], plan: Plan | None, weights: dict[str, Any]
) -> list[str]:
    """The report, and the files that were asked for. Says which could not be written."""
    from . import huggingface, report

    results = [trainer.result() for trainer in trainers]
    say(report.text(trainers, results))
    failures = []
    for folder, write in (
        (args.out, lambda: report.write(args.out, trainers, results, plan)),
        (args.export, lambda: huggingface.export(trainers[-1].model, weights, source.tokenizer, args.export)),
    ):
        if folder:
            try:
                write()
                say(f"Written: {folder}")
            except OSError as error:  # the other one is tried all the same
                failures.append(f"results could not be written: {error}")
    return failures


def main(args: argparse.Namespace) -> None:
    """Checks everything, trains, reports.

    Raises OptionError before anything is written, Stopped at Ctrl-C or SIGTERM, and after the results SystemExit with
    a line where a checkpoint or a result could not be written.
    """
    check_installed("rich", *(["matplotlib"] if args.out else []))
    from . import checkpoint
    from .distributed import Processes
    from .fit import fit
    from .loop import Trainer, load, resolve_device

    group = Processes.from_environment()
    state = checkpoint.load(args.resume) if args.resume else None
    before = TrainConfig(batch_factor=group.world) if state is None else TrainConfig.from_dict(state["config"])
    config = before.replace(**given_options(args))
    config.validate()
    check_installed(*([] if config.is_preset else ["transformers"]))  # also for a resumed run
    check_modes(args, config, group.world)
    if save := args.save or args.resume:
        checkpoint.check_save("save" if args.save else "resume", save, args.out)
    with group.joined(config.device):
        source, plan = load(config), None
        configs = [config.baseline(), config] if args.compare else [config]
        if args.fit:
            config, plan = fit(config, source, args.fit, vars(args), resolve_device(config, group).type)
            configs = [config]
        trainers = [Trainer(each, source, group) for each in configs]
        if state:
            load_state(trainers[0], state, args.resume)
            state = None  # now a copy of what the model and the optimizer have
        for name in ("out", "export") if group.first else ():
            if folder := getattr(args, name):
                checkpoint.check_folder(name, folder, empty=name == "export")
        if group.first:
            say(source.corpus.description())
        failures = [train(trainers, save)]
        weights = trainers[-1].weights() if args.export else {}
        if group.first:
            failures += write_results(args, source, trainers, plan, weights)
        group.barrier()
    if any(failures):
        raise SystemExit(f"memkern train: {'; '.join(filter(None, failures))}")
