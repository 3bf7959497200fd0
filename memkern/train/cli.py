"""``python -m memkern train``: the run from checks to files."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..options import OptionError
from .arguments import add_arguments, given_options
from .config import TrainConfig
from .paths import RESULTS, check_paths, locked

if TYPE_CHECKING:
    from ..planner.outcome import Plan
    from .build import Source
    from .distributed import Processes
    from .loop import Trainer
    from .phases import Phases

__all__ = ["Stopped", "add_arguments", "main"]


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, after a checkpoint was written; the message says where. ``status``: the process's own."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.status = 128 + number


def check_installed(names: tuple[str, ...]) -> None:
    """Exits with the cure where a package of the extra [train] is absent."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    if absent:
        raise SystemExit(f"memkern train needs {' and '.join(absent)}, which the extra memkern[train] brings")


def needed(args: argparse.Namespace) -> tuple[str, ...]:
    """The packages of the extra [train] that the arguments need."""
    names = ["rich"]
    if args.out:
        names.append("matplotlib")
    if args.evaluate and hasattr(args, "weights_on_host"):
        names.append("accelerate")
    return tuple(names)


def weights_of_evaluation(args: argparse.Namespace) -> str | None:
    """Takes --weights-on-host of an evaluation out of the arguments, where it is no technique of training.

    Raises OptionError for "model" without --evaluate.
    """
    if args.evaluate:
        return vars(args).pop("weights_on_host", None)
    if getattr(args, "weights_on_host", None) == "model":
        raise OptionError("weights_on_host", "'model' given; allowed: none, layers, and with --evaluate model")
    return None


def read_config(args: argparse.Namespace, state: dict[str, Any] | None, world: int) -> TrainConfig:
    """The config of the resumed run, or the default one, with the options that are given; checked."""
    before = TrainConfig(batch_factor=world) if state is None else TrainConfig.from_dict(state["config"])
    config = before.replace(**given_options(args))
    config.validate()
    return config


def check_arguments(args: argparse.Namespace, config: TrainConfig, world: int) -> None:
    """Raises OptionError for arguments that exclude each other, and for paths that cannot be written."""
    if args.compare and (args.save or args.resume or args.export):
        name = "save" if args.save else "resume" if args.resume else "export"
        raise OptionError("compare", f"given with --{name}; allowed: without --save, --resume and --export")
    if args.fit and (args.compare or args.resume):
        name = "compare" if args.compare else "resume"
        raise OptionError("fit", f"given with --{name}; allowed: without --compare and --resume")
    files = ("compare", "resume", "save", "out", "export", "fit")
    if args.evaluate and (given := next((name for name in files if getattr(args, name)), None)):
        raise OptionError("evaluate", f"given with --{given}; allowed: without --{', --'.join(files)}")
    for name in ("compare", "fit", "evaluate"):
        if getattr(args, name) and world > 1:
            raise OptionError(name, f"given in {world} processes; allowed in one")
    if args.export and config.is_preset:
        raise OptionError("export", f"given with --model {config.model}; allowed with models of transformers")
    check_paths(args, config)


@contextmanager
def process_group(group: Processes, device: str | None) -> Iterator[None]:
    """torch.distributed's, where there are several processes: gloo on the CPU, nccl on CUDA devices.

    Alone, ends the one that weights on the host have needed.
    """
    import torch

    if group.world == 1:
        had_one = torch.distributed.is_available() and torch.distributed.is_initialized()
        try:
            yield
        finally:
            if not had_one and torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        return

    on_cuda = torch.cuda.is_available() if device is None else device.startswith("cuda")
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo")
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


class Saver:
    """Called after each step: writes checkpoints. At Ctrl-C or SIGTERM in any process all write one and stop.

    A checkpoint that cannot be written, as on a full disk, does not end the run: the file of the step before stays, and
    the next one that is due is tried. ``failure`` says why the last one was not written.
    """

    def __init__(self, path: Path, interrupted: Callable[[], int]) -> None:
        self.path, self.interrupted = path, interrupted
        self.failure: str | None = None
        self.written: int | None = None  # the step of the last checkpoint of this run

    def __call__(self, trainer: Trainer) -> None:
        import torch

        done, config, group = trainer.steps_done, trainer.config, trainer.group
        last = done == config.steps
        number = self.interrupted()
        noted = torch.tensor(float(number > 0), device=trainer.device)
        stop = bool(group.sum(noted) > 0) and not last
        if stop or last or done % config.save_every == 0:
            state = trainer.state_dict()
            if group.first:
                self._write(state, done, last or stop)
            group.barrier()
        if stop:
            raise Stopped(self._where(done, config.steps), number or signal.SIGINT)

    def _write(self, state: dict[str, Any], done: int, final: bool) -> None:
        from . import checkpoint

        try:
            checkpoint.save(self.path, state)
            self.failure, self.written = None, done
        except (OSError, RuntimeError) as error:  # torch.save wraps some OSErrors in RuntimeErrors
            cause = next((e for e in (error, error.__context__) if isinstance(e, OSError)), error)
            self.failure = str(cause).splitlines()[0]
            if not final:
                print(
                    f"\nNo checkpoint after step {done}: {self.failure}. {self.kept()}; training goes on, and the next "
                    "checkpoint is tried when it is due",
                    file=sys.stderr,
                    flush=True,
                )

    def kept(self) -> str:
        """Says which checkpoint the file holds after a failure."""
        if self.written is not None:
            return f"{self.path} has that of step {self.written}"
        return f"{self.path} is as it was before this run" if self.path.exists() else f"{self.path} is not there"

    def _where(self, done: int, steps: int) -> str:
        if self.failure:
            return f"Stopped after step {done} of {steps} and not saved: {self.failure}. {self.kept()}"
        return f"Saved after step {done} of {steps}: go on with --resume {self.path}"


def train(trainers: Sequence[Trainer], save_to: Path | None) -> tuple[Phases, str | None]:
    """Runs all to the end, with progress, checkpoints and, for a run alone, the memory of its phases.

    The second result says why the last checkpoint was not written, where it was not.
    """
    from .interrupt import deferred
    from .loop import Diverged, run
    from .phases import Phases
    from .progress import display

    phases = Phases(trainers[0].device)
    if len(trainers) == 1:
        trainers[0].phases = phases
    shown = display(trainers) if trainers[0].group.first else nullcontext(lambda trainer: None)
    with shown as show, deferred() if save_to else nullcontext(lambda: 0) as interrupted, phases:
        save = Saver(save_to, interrupted) if save_to else None

        def on_step(trainer: Trainer) -> None:
            if save:  # before anything is shown
                save(trainer)
            show(trainer)

        try:
            run(trainers, on_step)
        except Diverged as error:
            raise SystemExit(f"{error}; try a lower --lr or a longer --warmup") from error
    if save is None or save.failure is None:
        return phases, None
    return phases, f"the last checkpoint could not be written: {save.failure}. {save.kept()}"


def write_results(
    args: argparse.Namespace,
    source: Source,
    trainers: Sequence[Trainer],
    phases: Phases,
    plan: Plan | None,
    weights: dict[str, Any],
) -> str | None:
    """The report, and the files that were asked for. Says which could not be written."""
    from . import report

    results = [trainer.result() for trainer in trainers]
    config, alone = trainers[-1].config, phases if len(trainers) == 1 else None
    report.print_report(results)
    if alone is not None:
        report.print_phases(alone)

    def out() -> None:
        from .plot import write_memory_png, write_png

        args.out.mkdir(parents=True, exist_ok=True)
        content = report.to_json(config, source.corpus, trainers, results, alone, plan)
        report.write_json(args.out / RESULTS[0], content)
        write_png(args.out / RESULTS[1], config, results)
        if alone is not None and alone.curve:
            write_memory_png(args.out / RESULTS[2], config, alone)

    def export() -> None:
        from . import huggingface

        huggingface.export(trainers[-1].model, weights, source.tokenizer, args.export)

    failures = []
    for folder, write in ((args.out, out), (args.export, export)):
        if folder:
            try:
                write()
                print(f"Written: {folder}")
            except OSError as error:  # the other one is tried all the same
                failures.append(f"results could not be written: {error}")
    return "; ".join(failures) or None


def fitted(args: argparse.Namespace, config: TrainConfig, source: Source, group: Processes) -> tuple[TrainConfig, Plan]:
    """The planner's choice for --fit, and its plan; printed too."""
    from ..planner.waiting import waiting
    from .build import resolve_device
    from .fit import fit

    with waiting() if group.first else nullcontext():
        config, plan = fit(config, source, args.fit, vars(args), resolve_device(config, group).type)
    if group.first and plan.recommended is not None:
        peak = plan.recommended.peak / 2**30
        print(f"{args.fit} fit {plan.recommended.techniques}: {peak:.2f} GiB predicted", flush=True)
    return config, plan


def print_evaluation(config: TrainConfig, on_host: str | None) -> None:
    """The validation loss of a model that is not trained."""
    from .build import load
    from .evaluation import check_on_host, evaluate

    check_on_host(config, on_host)
    source = load(config)
    print(source.corpus.description(), flush=True)
    loss = evaluate(config, source, on_host)
    print(f"Validation loss {loss:.4f} nats per {source.corpus.unit}.")


def load_state(trainer: Trainer, state: dict[str, Any], path: Path) -> None:
    """Continues the run of a checkpoint. Raises OptionError for one that has its keys and not what belongs to them."""
    try:
        trainer.load_state_dict(state)
    except OptionError:
        raise
    except Exception as error:  # whatever is there, in torch's classes and in memkern's
        why = " ".join(str(error).split()) or "nothing more is known"
        raise OptionError("resume", f"{str(path)!r} cannot be continued: {type(error).__name__}: {why}") from error


def main(args: argparse.Namespace) -> None:
    """Checks everything, trains, reports.

    Raises OptionError before anything is written, Stopped at Ctrl-C or SIGTERM, and after the results SystemExit with
    a line where a checkpoint or a result could not be written.
    """
    check_installed(needed(args))
    from . import checkpoint, heap
    from .build import load
    from .distributed import Processes
    from .loop import Trainer, comparison

    group = Processes.from_environment()
    state = checkpoint.load(args.resume) if args.resume else None
    on_host = weights_of_evaluation(args)
    config = read_config(args, state, group.world)
    check_installed(() if config.is_preset else ("transformers",))  # also for a resumed run
    check_arguments(args, config, group.world)
    if args.evaluate:
        return print_evaluation(config, on_host)
    configs = comparison(config) if args.compare else [config]
    if args.fit:
        heap.map_large_blocks()
    save = args.save or args.resume
    alone = locked("save" if args.save else "resume", save) if save and group.first else nullcontext()
    with alone, process_group(group, config.device):
        source, plan = load(config), None
        if args.fit:
            config, plan = fitted(args, config, source, group)
            configs = [config]
        heap.trim()  # frees what reading the text and planning left
        trainers = [Trainer(each, source, group) for each in configs]
        trainers[0].counts_peak = not args.fit
        if state:
            load_state(trainers[0], state, args.resume)
            state = None  # now a copy of what the model and the optimizer have
        if group.first:
            print(source.corpus.description(), flush=True)
        phases, failure = train(trainers, save)
        weights = trainers[-1].weights() if args.export else {}
        if group.first:
            failures = (failure, write_results(args, source, trainers, phases, plan, weights))
            failure = "; ".join(filter(None, failures))
        group.barrier()
    if failure:
        raise SystemExit(f"memkern train: {failure}")
