"""The results of a run: a table, one sentence, and a JSON file."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import filesize
from rich.console import Console
from rich.table import Table

from .. import backend
from ..planner.outcome import Plan
from .config import TrainConfig
from .data import Corpus
from .loop import RunResult, Trainer
from .paths import replacing
from .phases import Phases

SAME_LOSS = 0.01  # losses less than 1 % apart are called the same


def size(count: int) -> str:
    """Bytes in decimal units."""
    return filesize.decimal(count, precision=2)


def summary(results: Sequence[RunResult]) -> str:
    """The figures in one sentence, which says whether the losses differ."""
    ours = results[-1]
    if len(results) == 1:
        return (
            f"Validation loss {ours.validation_loss:.4f}; "
            f"optimizer state {ours.bytes_per_parameter:.2f} bytes per parameter."
        )
    baseline = results[0]
    share = 100 * ours.optimizer_bytes / baseline.optimizer_bytes
    state = f"optimizer state {share:.1f} % of {baseline.optimizer}'s"
    if ours.saved_bytes != baseline.saved_bytes:
        saved = 100 * ours.saved_bytes / baseline.saved_bytes
        state += f", activations saved for the backward pass {saved:.1f} % of {baseline.activations}'s"
    difference = ours.validation_loss / baseline.validation_loss - 1
    if not math.isfinite(difference):
        return f"No loss to compare; {state}."
    if abs(difference) < SAME_LOSS:
        within = max(0.1, math.ceil(abs(difference) * 1000) / 10)  # rounded up: it is a bound
        return f"Same validation loss within {within:.1f} %; {state}."
    direction = "higher" if difference > 0 else "lower"
    return (
        f"Validation loss {100 * abs(difference):.1f} % {direction} "
        f"({ours.validation_loss:.4f} against {baseline.validation_loss:.4f}); {state}."
    )


def table(results: Sequence[RunResult]) -> Table:
    """The figures, a column for each run, and for two runs the second's over the first's."""
    grid = Table(title=f"{results[0].parameters:,} parameters", title_justify="left")
    grid.add_column("")
    for result in results:
        grid.add_column(result.optimizer, justify="right")
    rows: list[tuple[str, Any, Any]] = [
        ("activations", lambda r: r.activations, str),
        (f"validation loss, nats per {results[0].unit}", lambda r: r.validation_loss, "{:.4f}".format),
        ("optimizer state", lambda r: r.optimizer_bytes, size),
        ("optimizer state per parameter", lambda r: r.bytes_per_parameter, "{:.3f} B".format),
        ("saved for the backward pass", lambda r: r.saved_bytes, size),
        ("peak tensor bytes of a step", lambda r: r.peak_bytes, size),
        ("median step", lambda r: r.median_step_seconds * 1000, "{:.1f} ms".format),
        (
            f"{'texts' if results[0].unit == 'text' else 'tokens'} per second",
            lambda r: r.tokens_per_second,
            "{:,.0f}".format,
        ),
    ]
    if any(result.peak_bytes is None for result in results):
        rows = [row for row in rows if not row[0].startswith("peak")]
    if len(results) == 2:
        grid.add_column("ratio", justify="right")
    for title, value, form in rows:
        values = [value(result) for result in results]
        cells = [form(given) for given in values]
        if len(values) == 2:
            cells.append("" if form is str else f"{values[1] / values[0]:.3f}")
        grid.add_row(title, *cells)
    return grid


def print_report(results: Sequence[RunResult]) -> None:
    """The table and the sentence."""
    console = Console(file=sys.stdout, highlight=False)
    console.print(table(results))
    console.print(summary(results))


def phase_table(phases: Phases) -> Table:
    """The memory at the end of each phase, in the first and the last step, and its peak."""
    what = "allocated on the device" if phases.device.type == "cuda" else "resident set of the process"
    grid = Table(title=f"Memory by phase: {what}", title_justify="left")
    grid.add_column("")
    for heading in ("first step", "last step", "peak"):
        grid.add_column(heading, justify="right")
    for phase, row in phases.table.items():
        grid.add_row(phase, *(binary_size(value) for value in (row.first or 0, row.last or 0, row.peak)))
    return grid


def binary_size(count: float) -> str:
    """Bytes in GiB, as devices are sold."""
    return f"{count / 2**30:.3f} GiB"


def print_phases(phases: Phases) -> None:
    """The table of the phases; nothing where the system does not tell."""
    peak = phases.peak
    if peak is None:
        return
    console = Console(file=sys.stdout, highlight=False)
    console.print(phase_table(phases))
    console.print(f"Peak: {binary_size(peak)}.")


def to_json(
    config: TrainConfig,
    corpus: Corpus,
    trainers: Sequence[Trainer],
    results: Sequence[RunResult],
    phases: Phases | None = None,
    plan: Plan | None = None,
) -> dict[str, Any]:
    """The figures and the conditions they were measured under, as plain JSON values."""
    device = trainers[0].device
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "summary": summary(results),
        "config": {
            **dataclasses.asdict(config),
            "lr": config.peak_lr,
            "weight_decay": config.decay,
            "warmup": config.warmup_steps,
        },
        "data": {
            "name": corpus.name,
            "files": corpus.files,
            f"train_{corpus.unit}s": len(corpus.train),
            f"validation_{corpus.unit}s": len(corpus.validation),
            "digest": corpus.digest,
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "environment": backend.report(),
        "runs": [dataclasses.asdict(result) for result in results],
        "memory": None if phases is None else memory_json(phases),
        "plan": None if plan is None else plan.to_dict()["recommended"],
    }


def memory_json(phases: Phases) -> dict[str, Any]:
    """The peak in bytes, the table of the phases and the curve: pairs of seconds and bytes."""
    return {
        "peak": phases.peak,
        "phases": {phase: dataclasses.asdict(row) for phase, row in phases.table.items()},
        "curve": [(round(seconds, 4), value) for seconds, value in phases.curve],
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes ``content`` to ``path``, atomically."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
