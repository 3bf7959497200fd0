"""Reports the results of a run: progress, a table, one sentence, a JSON file and the picture of the losses."""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import backend
from ..planner.outcome import Plan
from .checkpoint import RESULTS, replacing
from .interrupt import say
from .loop import Trainer

LINES = 20  # of progress in a run
Results = list[dict[str, Any]]  # of Trainer.result

# label, key of Trainer.result, format
ROWS: list[tuple[str, str, Callable[[Any], str]]] = [
    ("validation loss, nats per token", "validation_loss", "{:.4f}".format),
    ("optimizer state, MB", "optimizer_bytes", lambda count: f"{count / 1e6:.2f}"),
    ("saved for the backward pass, MB", "saved_bytes", lambda count: f"{count / 1e6:.2f}"),
    ("median step, seconds", "median_step_seconds", "{:.4f}".format),
    ("tokens per second", "tokens_per_second", "{:,.0f}".format),
]


def progress(trainers: Sequence[Trainer]) -> Callable[[Trainer], None]:
    """A function to call with a trainer after each step: it prints a line at every twentieth of the steps."""
    began, steps_before = time.monotonic(), sum(trainer.steps_done for trainer in trainers)

    def show(trainer: Trainer) -> None:
        step, steps, history = trainer.steps_done, trainer.config.steps, trainer.history
        if step % max(1, steps // LINES) and step != steps:
            return
        validation = f"{history.validation[-1][1]:.3f}" if history.validation else " ... "
        steps_done = sum(trainer.steps_done for trainer in trainers)
        seconds_left = (time.monotonic() - began) / (steps_done - steps_before) * (steps * len(trainers) - steps_done)
        speed = trainer.config.tokens_per_step / history.seconds[-1]
        say(
            f"{trainer.config.label:<16} step {step:>{len(str(steps))}}/{steps}  loss "
            f"{history.train_loss[-1]:.3f}  val {validation}  {speed:>6,.0f} tokens/s  {seconds_left:.0f} s left"
        )

    return show


def summary(results: Results) -> str:
    """The figures in one sentence."""
    ours, baseline = results[-1], results[0]
    loss = f"Validation loss {ours['validation_loss']:.4f}"
    if len(results) == 1:
        return f"{loss}; optimizer state {ours['optimizer_bytes'] / ours['parameters']:.2f} bytes per parameter."
    ratio = {name: 100 * ours[name] / baseline[name] for _, name, _ in ROWS}
    return (
        f"{loss}, {ratio['validation_loss'] - 100:+.2f} % against {baseline['optimizer']}; optimizer state "
        f"{ratio['optimizer_bytes']:.1f} %, saved for the backward pass {ratio['saved_bytes']:.1f} % of its run's."
    )


def peak(device: torch.device) -> str:
    """The peak of the device's memory, or on the CPU of the process."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.3f} GiB allocated on the device"
    import resource

    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return f"{peak_bytes / 2**30:.3f} GiB of the process"


def text(trainers: Sequence[Trainer], results: Results) -> str:
    """The figures, a column for each run, and for two runs the second's over the first's; the sentence; the peak."""
    lines = [[f"{results[0]['parameters']:,} parameters", *(result["optimizer"] for result in results), "ratio"]]
    for title, name, format_figure in ROWS:
        values = [result[name] for result in results]
        lines.append([title, *map(format_figure, values), f"{values[-1] / values[0]:.3f}"])
    columns = 1 + len(results) + (len(results) == 2)
    table = [f"{line[0]:<40}" + "".join(f"{cell:>16}" for cell in line[1:columns]) for line in lines]
    peak_lines = [f"Peak: {peak(trainers[0].device)}."] if len(results) == 1 else []
    return "\n".join([*table, summary(results), *peak_lines])


def write(folder: Path, trainers: Sequence[Trainer], results: Results, plan: Plan | None = None) -> None:
    """Writes results.json, the figures and the conditions they were measured under, and losses.png, each atomically."""
    config, corpus, device = trainers[-1].config, trainers[-1].corpus, trainers[-1].device
    rates = {"lr": config.peak_lr, "weight_decay": config.decay, "warmup": config.warmup_steps}
    content = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "summary": summary(results),
        "config": dataclasses.asdict(config) | rates,
        "data": {"description": corpus.description(), "digest": corpus.digest},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "environment": backend.report(),
        "runs": results,
        "plan": None if plan is None else plan.to_dict()["recommended"],
    }
    with replacing(folder / RESULTS[0]) as temporary:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    with replacing(folder / RESULTS[1]) as temporary:
        losses(results).savefig(temporary, format="png")


def losses(results: Results) -> Any:
    """Training and validation losses over the steps; runs overlaid."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.8), dpi=150, layout="constrained")
    axes = figure.subplots()
    # The baseline is a broad pale line that stays visible under ours where the two coincide.
    for result, (color, width) in zip(results, (("#9db4c0", 3.0), ("#c8553d", 0.8))[-len(results) :], strict=True):
        name, history = result["optimizer"], result["history"]
        steps = range(1, len(history["train_loss"]) + 1)
        axes.plot(steps, history["train_loss"], color=color, lw=width, label=f"{name}, training")
        label = f"{name}, validation {result['validation_loss']:.4f}"
        axes.plot(*zip(*history["validation"], strict=True), "o", ms=6 + width, mfc=color, mec="white", label=label)
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.set_title(summary(results), fontsize=10, wrap=True)
    axes.grid(color="#dfe5e8", lw=0.8)
    axes.legend(frameon=False, fontsize=9)
    return figure
