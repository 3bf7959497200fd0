"""The progress of a run: bars on a terminal, twenty lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .loop import Trainer

LINES = 20
RECENT = 20


def tokens_per_second(trainer: Trainer) -> float:
    """Over the last steps."""
    seconds = trainer.history.seconds[-RECENT:]
    return trainer.config.tokens_per_step * len(seconds) / sum(seconds)


def status(trainer: Trainer) -> str:
    """Losses and speed in one line."""
    history = trainer.history
    validation = f"{history.validation[-1][1]:.3f}" if history.validation else " ... "
    speed = tokens_per_second(trainer)
    return f"loss {history.train_loss[-1]:.3f}  val {validation}  {speed:>6,.0f} tokens/s"


class Lines:
    """Twenty lines for each run, and one for every validation."""

    def __init__(self, trainers: Sequence[Trainer]) -> None:
        self.began = time.monotonic()
        self.first = sum(trainer.steps_done for trainer in trainers)
        self.total = sum(trainer.config.steps for trainer in trainers)
        self.trainers = trainers

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __call__(self, trainer: Trainer) -> None:
        step, steps = trainer.steps_done, trainer.config.steps
        validated = bool(trainer.history.validation) and trainer.history.validation[-1][0] == step
        if not validated and step % max(1, steps // LINES):
            return
        done = sum(trainer.steps_done for trainer in self.trainers)
        left = (time.monotonic() - self.began) / (done - self.first) * (self.total - done)
        name = trainer.config.techniques.label
        print(
            f"{name:<16} step {step:>{len(str(steps))}}/{steps}  {status(trainer)}  {left:.0f} s left",
            flush=True,
        )


class Bars:
    """One bar for each run."""

    def __init__(self, trainers: Sequence[Trainer]) -> None:
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
        )
        self.tasks = {
            trainer: self.progress.add_task(
                trainer.config.techniques.label,
                total=trainer.config.steps,
                completed=trainer.steps_done,
                status="",
            )
            for trainer in trainers
        }

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def __call__(self, trainer: Trainer) -> None:
        self.progress.update(self.tasks[trainer], completed=trainer.steps_done, status=status(trainer))


def display(trainers: Sequence[Trainer]) -> Bars | Lines:
    """Bars or lines, whichever suits standard output: a context manager to call with a trainer after its every step."""
    return Bars(trainers) if sys.stdout.isatty() else Lines(trainers)
