"""Reads the results, and compares each contender with its 32-bit original by paired seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import report

from .contenders import CONTENDERS, Contender
from .runs import GRID, TUNING_SEED, Key, Outcome
from .tasks import TASKS, LargeBatch, Task

COLUMNS = (
    *report.PROVENANCE,
    "task",
    "contender",
    "lr",
    "seed",
    *Outcome._fields,
    "package",
    "version",
    "note",
)
# By the number n of seeds: how often the mean of n paired differences is more than two of its standard errors from 0
# though the contenders are equal (Student's t with n - 1 degrees of freedom).
CHANCE = {3: 0.184, 5: 0.116}
NOT_YET = "not run yet"


def read(path: Path) -> list[report.Row]:
    return report.read(path) if path.exists() else []


def losses(rows: Sequence[report.Row]) -> dict[Key, float]:
    return {(r["task"], r["contender"], r["lr"], r["seed"]): float(r["loss"]) for r in rows if r["loss"]}


class Difference(NamedTuple):
    """The mean difference of losses over seeds, and its standard error."""

    mean: float
    error: float

    @property
    def beyond(self) -> bool:
        """Whether the mean is more than two standard errors from 0."""
        return abs(self.mean) > 2 * self.error


class Compared(NamedTuple):
    """How a contender fared in a task, compared with its original."""

    task: Task
    contender: Contender
    losses: dict[int, float]  # by seed, the losses at the best rate; without the tuning seed
    lr: str  # the best rate
    at_edge: bool  # whether lr is the lowest or highest rate that was tried
    row: report.Row  # the last run's row at the best rate
    difference: Difference | None = None  # the contender's losses minus the original's at the same rate
    tuned: Difference | None = None  # the contender's losses minus the original's at the original's best rate
    why: str = ""  # the reason where there are no losses

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses.values())

    @property
    def loss_error(self) -> float:
        return standard_error([*self.losses.values()])

    @property
    def verdict(self) -> str:
        """The difference at the contender's rate in words; "" without losses."""
        if self.why:
            return ""
        if not math.isfinite(self.loss):
            return "diverged"
        if self.difference is None:
            return "original" if self.contender.original == self.contender.name else "no original"
        if not self.difference.beyond:
            return "as good"
        return "better" if self.difference.mean < 0 else "worse"


def standard_error(values: Sequence[float]) -> float:
    if len(values) < 2 or not all(map(math.isfinite, values)):  # a run diverged
        return math.nan
    return statistics.stdev(values) / math.sqrt(len(values))


def paired(values: dict[int, float], originals: dict[int, float]) -> Difference | None:
    """The difference over the seeds that both have; None with fewer than two, or where a run diverged."""
    differences = [values[seed] - originals[seed] for seed in values if seed in originals]
    if len(differences) < 2 or not all(map(math.isfinite, differences)):
        return None
    return Difference(statistics.fmean(differences), standard_error(differences))


def _rates(task: Task, contender: Contender, rows: Sequence[report.Row]) -> dict[str, float]:
    """The tuning seed's losses by rate, {} while the grid is incomplete. A large batch has one rate, scaled from the
    best of the small batch."""
    tuned = {
        r["lr"]: float(r["loss"])
        for r in rows
        if (r["task"], r["contender"], r["seed"]) == (task.name, contender.name, str(TUNING_SEED)) and r["loss"]
    }
    if isinstance(task, LargeBatch) and task.factor > 1:
        small = _rates(TASKS["batch-x1"], contender, rows)
        if len(small) < len(GRID):
            return {}
        best = float(min(small, key=lambda lr: small[lr]))
        return {f"{task.scaled(contender.family, best):.5g}": 0.0}
    return tuned if len(tuned) >= len(GRID) else {}


def _runs_at(task: Task, contender: Contender, lr: str, rows: Sequence[report.Row]) -> dict[int, report.Row]:
    """The rows of a rate by seed, without the tuning seed."""
    return {
        int(r["seed"]): r
        for r in rows
        if (r["task"], r["contender"], r["lr"]) == (task.name, contender.name, lr)
        and r["loss"]
        and int(r["seed"]) != TUNING_SEED
    }


def _best(task: Task, contender: Contender, rows: Sequence[report.Row]) -> Compared:
    """A contender in a task at its best rate, without differences yet."""
    empty = Compared(task, contender, {}, "", False, {}, why=NOT_YET)
    mine = [r for r in rows if (r["task"], r["contender"]) == (task.name, contender.name)]
    if failed := [r["note"] for r in mine if not r["loss"]]:
        return empty._replace(why=failed[-1])
    tuned = _rates(task, contender, rows)
    if not tuned:
        return empty
    seeds = {*task.compared}
    runs = {lr: _runs_at(task, contender, lr, rows) for lr in dict.fromkeys(r["lr"] for r in mine)}
    complete = {lr: by_seed for lr, by_seed in runs.items() if seeds <= {*by_seed}}
    lr = min(tuned, key=lambda rate: tuned[rate])
    if lr not in complete:
        return empty
    # Of the rates with all seeds, which may be those of the original or of its contenders, the best mean decides.
    means = {rate: statistics.fmean(float(r["loss"]) for r in runs_at.values()) for rate, runs_at in complete.items()}
    lr = min(means, key=lambda rate: means[rate])
    at_best = complete[lr]
    tried = sorted(map(float, tuned))
    at_edge = len(tried) > 1 and float(lr) in (tried[0], tried[-1])
    by_seed = {seed: float(r["loss"]) for seed, r in at_best.items()}
    return Compared(task, contender, by_seed, lr, at_edge, at_best[max(at_best)], why="")


def compare(rows: Sequence[report.Row]) -> dict[tuple[str, str], Compared]:
    """The comparisons by task and contender, in the order of TASKS and CONTENDERS."""
    compared = {(t.name, c.name): _best(t, c, rows) for t in TASKS.values() for c in CONTENDERS.values()}
    for (task, name), entry in compared.items():
        original = compared[task, entry.contender.original]
        if name != entry.contender.original and entry.losses:
            runs = _runs_at(entry.task, original.contender, entry.lr, rows)
            at_same_rate = {seed: float(r["loss"]) for seed, r in runs.items()}
            compared[task, name] = entry._replace(
                difference=paired(entry.losses, at_same_rate), tuned=paired(entry.losses, original.losses)
            )
    return compared
