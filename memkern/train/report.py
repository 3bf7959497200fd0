"""The results of a run: progress, a table, one sentence, a JSON file and the picture of the losses."""

from __future__ import annotations

import dataclasses
import datetime
import io
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .. import backend
from ..planner.outcome import Plan
from .checkpoint import RESULTS, replacing
from .interrupt import say
from .loop import RunResult, Trainer

SAME_LOSS = 0.01  # losses less than 1 % apart are called the same
LINES = 20  # of progress, where standard output is no terminal


def status(trainer: Trainer) -> str:
    """Losses, and the speed of the last steps, in one line."""
    history = trainer.history
    validation = f"{history.validation[-1][1]:.3f}" if history.validation else " ... "
    seconds = history.seconds[-LINES:]
    speed = trainer.config.tokens_per_step * len(seconds) / sum(seconds)
    return f"loss {history.train_loss[-1]:.3f}  val {validation}  {speed:>6,.0f} tokens/s"


@contextmanager
def display(trainers: Sequence[Trainer]) -> Iterator[Callable[[Trainer], None]]:
    """Gives what to call with a trainer after its every step: a bar for each run, and without a terminal lines."""
    names = {trainer: trainer.config.techniques.label for trainer in trainers}
    if sys.stdout is None or not sys.stdout.isatty():
        began, first = time.monotonic(), sum(trainer.steps_done for trainer in trainers)
        total = sum(trainer.config.steps for trainer in trainers)

        def line(trainer: Trainer) -> None:
            step, steps, validation = trainer.steps_done, trainer.config.steps, trainer.history.validation
            if step % max(1, steps // LINES) == 0 or (validation and validation[-1][0] == step):
                done = sum(trainer.steps_done for trainer in trainers)
                left = (time.monotonic() - began) / (done - first) * (total - done)
                at = f"step {step:>{len(str(steps))}}/{steps}"
                say(f"{names[trainer]:<16} {at}  {status(trainer)}  {left:.0f} s left")

        yield line
        return
    text = TextColumn("[bold]{task.description}"), TextColumn("{task.fields[status]}")
    with Progress(text[0], BarColumn(bar_width=24), MofNCompleteColumn(), text[1], TimeRemainingColumn()) as bars:
        tasks = {
            trainer: bars.add_task(name, total=trainer.config.steps, completed=trainer.steps_done, status="")
            for trainer, name in names.items()
        }
        yield lambda trainer: bars.update(tasks[trainer], completed=trainer.steps_done, status=status(trainer))


def size(count: int) -> str:
    """Bytes in decimal units."""
    return filesize.decimal(count, precision=2)


def summary(results: Sequence[RunResult]) -> str:
    """The figures in one sentence, which says whether the losses differ."""
    ours = results[-1]
    loss = f"Validation loss {ours.validation_loss:.4f}"
    if len(results) == 1:
        return f"{loss}; optimizer state {ours.bytes_per_parameter:.2f} bytes per parameter."
    baseline = results[0]
    shares = [("optimizer state", ours.optimizer_bytes / baseline.optimizer_bytes)]
    if ours.saved_bytes != baseline.saved_bytes:
        shares.append(("saved for the backward pass", ours.saved_bytes / baseline.saved_bytes))
    state = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares) + f" of {baseline.optimizer}'s run"
    difference = ours.validation_loss / baseline.validation_loss - 1
    if not math.isfinite(difference):
        return f"No loss to compare; {state}."
    if abs(difference) < SAME_LOSS:
        within = max(0.1, math.ceil(abs(difference) * 1000) / 10)  # rounded up: it is a bound
        return f"Same validation loss within {within:.1f} %; {state}."
    direction = "higher" if difference > 0 else "lower"
    against = f"({ours.validation_loss:.4f} against {baseline.validation_loss:.4f})"
    return f"Validation loss {100 * abs(difference):.1f} % {direction} {against}; {state}."


def peak(device: torch.device) -> str:
    """The peak of the device's memory, or on the CPU of the process."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.3f} GiB allocated on the device"
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return f"{used / 2**30:.3f} GiB of the process"


def text(trainers: Sequence[Trainer], results: Sequence[RunResult]) -> str:
    """The figures, a column for each run, and for two runs the second's over the first's; the sentence; the peak."""
    grid = Table(title=f"{results[0].parameters:,} parameters", title_justify="left")
    for title in ("", *(result.optimizer for result in results), *(["ratio"] if len(results) == 2 else [])):
        grid.add_column(title, justify="right" if title else "left")
    rows: list[tuple[str, str, Callable[[Any], str]]] = [
        (f"validation loss, nats per {results[0].unit}", "validation_loss", "{:.4f}".format),
        ("optimizer state", "optimizer_bytes", size),
        ("optimizer state per parameter", "bytes_per_parameter", "{:.3f} B".format),
        ("saved for the backward pass", "saved_bytes", size),
        ("median step", "median_step_seconds", "{:.4f} s".format),
        ("tokens per second", "tokens_per_second", "{:,.0f}".format),
    ]
    for title, name, form in rows:
        values = [getattr(result, name) for result in results]
        ratio = [f"{values[1] / values[0]:.3f}"] if len(values) == 2 else []
        grid.add_row(title, *map(form, values), *ratio)
    out = io.StringIO()
    Console(file=out, highlight=False, width=100).print(grid, summary(results))
    return out.getvalue().rstrip() + (f"\nPeak: {peak(trainers[0].device)}." if len(trainers) == 1 else "")


def to_json(trainers: Sequence[Trainer], results: Sequence[RunResult], plan: Plan | None = None) -> dict[str, Any]:
    """The figures and the conditions they were measured under, as plain JSON values."""
    trainer = trainers[-1]
    config, corpus, device = trainer.config, trainer.corpus, trainer.device
    rates = {"lr": config.peak_lr, "weight_decay": config.decay, "warmup": config.warmup_steps}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "summary": summary(results),
        "config": dataclasses.asdict(config) | rates,
        "data": {"description": corpus.description(), "digest": corpus.digest},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "environment": backend.report(),
        "runs": [dataclasses.asdict(result) for result in results],
        "plan": None if plan is None else plan.to_dict()["recommended"],
    }


def write(folder: Path, trainers: Sequence[Trainer], results: Sequence[RunResult], plan: Plan | None = None) -> None:
    """Writes results.json and losses.png, each atomically."""
    content = json.dumps(to_json(trainers, results, plan), indent=1, allow_nan=False) + "\n"
    with replacing(folder / RESULTS[0]) as temporary:
        temporary.write_text(content)
    with replacing(folder / RESULTS[1]) as temporary:
        losses(results).savefig(temporary, format="png")


def losses(results: Sequence[RunResult]) -> Any:
    """Training losses, smoothed, and validation losses over the steps; runs overlaid."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.8), dpi=150, layout="constrained")
    axes = figure.subplots()
    # The baseline is a broad pale line that stays visible under ours where the two coincide.
    for result, (color, width) in zip(results, (("#9db4c0", 5.0), ("#c8553d", 1.6))[-len(results) :], strict=True):
        values = smoothed(result.history.train_loss)
        axes.plot(range(1, len(values) + 1), values, color=color, lw=width, label=f"{result.optimizer}, training")
        label = f"{result.optimizer}, validation {result.validation_loss:.4f}"
        axes.plot(*zip(*result.history.validation, strict=True), "o", ms=6 + width, mfc=color, mec="white", label=label)
    axes.set(xlabel="step", ylabel=f"loss, nats per {results[0].unit}")
    axes.set_title(summary(results), fontsize=10, wrap=True)
    axes.grid(color="#dfe5e8", lw=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return figure


def smoothed(values: Sequence[float]) -> list[float]:
    """Centred mean over a twentieth of the run; unlike an exponential average it does not lag."""
    reach = len(values) // 40
    near = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(some) / len(some) for some in near]
