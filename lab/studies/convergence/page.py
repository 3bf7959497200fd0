"""Makes the tables and the picture of docs/evidence.md from the results."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine, overview, report
from benchmarks.plot import FAINT, GRID, OTHERS, OURS
from lab import RESULTS

from . import results
from .contenders import ALL, CONTENDERS
from .results import CHANCE, NOT_YET, Compared, Difference
from .tasks import TASKS

PATH = RESULTS / "convergence.csv"
PICTURE = PATH.with_suffix(".png")
PAGE = machine.ROOT / "docs" / "evidence.md"
# package: color and marker
STYLES = {
    "torch": ("black", "s"),
    "memkern": (OURS, "o"),
    "bitsandbytes": ("#e8590c", "^"),
    "torchao": ("#9c36b5", "v"),
    "timm": ("#2f9e44", "D"),
    "pytorch_optimizer": (OTHERS, "P"),
    "gefen": (OTHERS, "X"),
    "gefen-x": (OTHERS, "d"),
}


@functools.cache
def compared() -> dict[tuple[str, str], Compared]:
    return results.compare(results.read(PATH))


def cell(entry: Compared) -> str:
    """A cell of the summary: a difference, bold beyond two standard errors, or why there is none."""
    if entry.why:
        return "" if entry.why == NOT_YET else "−"
    if entry.verdict in ("original", "diverged", "no original"):
        return entry.verdict
    assert entry.difference is not None
    text = f"{entry.difference.mean:+.2g}"
    return text if entry.verdict == "as good" else f"**{text}**"


def four_digits(value: float) -> str:
    """Four digits after the point, or one significant digit where they would be zeros."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 5e-5 else f"{value:.0e}"


def signed(value: float) -> str:
    return ("" if value < 0 else "+") + four_digits(value)


def with_error(difference: Difference) -> str:
    return f"{signed(difference.mean)} ± {four_digits(difference.error)}"


def summary_table() -> str:
    """Contenders by tasks: the difference of losses from the 32-bit original."""
    rows = []
    for contender in ALL:
        cells = [cell(compared()[task, contender.name]) for task in TASKS]
        original = "" if contender.original == contender.name else contender.original
        rows.append([contender.name, original, *cells])
    return report.table(["", "original", *TASKS], "ll" + "r" * len(TASKS), rows)


def _best_first(task: str) -> list[Compared]:
    """The contenders that ran in a task, the lowest loss first."""
    entries = [entry for (name, _), entry in compared().items() if name == task and entry.losses]
    return sorted(entries, key=lambda entry: entry.loss)


def tasks_table() -> str:
    """Each task, with the commit and the day of its best contender's run."""
    rows = []
    for name, task in TASKS.items():
        row = next((entry.row for entry in _best_first(name)), {"commit": "", "date": ""})
        rows.append([name, task.what, str(task.steps), str(task.seeds), f"{row['commit']}, {row['date'][:10]}"])
    return report.table(["task", "what is learned", "steps", "seeds", "commit"], "llrrl", rows)


def task_table(task: str) -> str:
    """One task: every contender that has runs, the best loss first, and below why others have none."""
    contenders = [entry for (name, _), entry in compared().items() if name == task]
    heads = (
        "",
        "rate",
        "loss",
        "− original",
        "",
        "seen from",
        "− original at its best",
        "B/param",
        "coded",
        "saved kB",
        "step ns/param",
        "whole step ms",
    )
    reasons: dict[str, list[str]] = {}
    for entry in contenders:
        if not entry.losses:
            reasons.setdefault(entry.why.rstrip("."), []).append(entry.contender.name)
    table = report.table(heads, "lrrrl" + "r" * (len(heads) - 5), map(_task_row, _best_first(task)))
    return "\n".join([table, "", *(f"- {', '.join(names)}: {why}." for why, names in reasons.items())]).rstrip()


def _task_row(entry: Compared) -> list[str]:
    difference = tuned = detectable = ""
    if entry.difference is not None:
        difference, detectable = with_error(entry.difference), four_digits(2 * entry.difference.error)
    if entry.tuned is not None:
        tuned = f"**{with_error(entry.tuned)}**" if entry.tuned.beyond else with_error(entry.tuned)
    row = entry.row
    return [
        entry.contender.name,
        entry.lr + (" at the edge" if entry.at_edge else ""),
        f"{entry.loss:.4f} ± {entry.loss_error:.4f}" if math.isfinite(entry.loss) else entry.verdict,
        difference,
        entry.verdict,
        detectable,
        tuned,
        f"{float(row['bytes_per_param']):.2f}",
        f"{float(row['coded_share']):.0%}",
        f"{float(row['saved_kb']):.0f}",
        f"{float(row['step_ns']):.1f}",
        f"{float(row['run_ms']):.1f}",
    ]


def chance() -> str:
    """A sentence: how many differences are beyond two standard errors, and how many would be by chance."""
    differing = [entry for entry in compared().values() if entry.difference is not None]
    beyond = [entry for entry in differing if entry.verdict in ("better", "worse")]
    ours = [entry for entry in differing if entry.contender.package == "memkern"]
    expected = sum(CHANCE[len(entry.losses)] for entry in differing)
    worse = [entry for entry in beyond if entry.verdict == "worse"]
    ours_expected = sum(CHANCE[len(entry.losses)] for entry in ours)
    return (
        f"{len(differing)} differences, {len(beyond)} of them beyond two standard errors ({len(worse)} worse, "
        f"{len(beyond) - len(worse)} better); {expected:.0f} would be if no contender differed from its original. "
        f"Of memkern's {len(ours)}: {sum(entry in beyond for entry in ours)} beyond "
        f"({sum(entry in worse for entry in ours)} worse), {ours_expected:.0f} by chance."
    )


def cost() -> str:
    """A sentence: the number of runs, their processor time, and the versions of packages."""
    rows = [row for row in results.read(PATH) if row["loss"]]
    seconds = sum(float(row["run_ms"]) * TASKS[row["task"]].steps for row in rows) / 1000
    versions = {row["package"]: row["version"] for row in rows}
    names = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return f"{len(rows):,} runs, {seconds / 60:.0f} minutes of one core in training steps; {names}."


def worse_table() -> str:
    """memkern's and torch's contenders more than two standard errors worse than their original, or diverged."""
    heads = ["task", "contender", "− original", "relative to the loss", "− original at its best"]
    rows = []
    for (task, name), entry in compared().items():
        if entry.contender.package not in ("torch", "memkern"):
            continue
        if entry.verdict == "diverged":
            rows.append([task, name, "diverged", "", ""])
        elif any(d is not None and d.beyond and d.mean > 0 for d in (entry.difference, entry.tuned)):
            difference = entry.difference
            share = "" if difference is None else f"{difference.mean / (entry.loss - difference.mean):+.2%}"
            cells = ["" if d is None else with_error(d) for d in (entry.difference, entry.tuned)]
            rows.append([task, name, cells[0], share, cells[1]])
    return report.table(heads, "llrrr", rows)


def papers_table() -> str:
    """Comparisons that papers published, beside the same ones here: the difference and its standard error."""

    def here(task: str, name: str, other: str | None = None) -> str:
        entry = compared()[task, name]
        pair = entry.difference
        if other is not None:
            pair = results.paired(entry.losses, compared()[task, other].losses)
        return f"{task} {with_error(pair)}" if pair else f"{task}: {entry.why or entry.verdict}"

    def line(comparison: str, published: str, *measured: str) -> str:
        return f"| {comparison} | {published} | {'; '.join(measured)} |"

    tasks = ("gpt", "rows", "digits")
    batches = ("batch-x1", "batch-x8", "batch-x64")
    return "\n".join(
        [
            "| comparison | published | here |",
            "|---|---|---|",
            line(
                "AdamW, block-wise 8 bits − 32 bits", "as good as 32 bits (Dettmers et al., arXiv 2110.02861)",
                *(here(task, name) for task in tasks for name in ("bitsandbytes AdamW8bit", "memkern AdamW8bit")),
            ),
            line(
                "LAMB − AdamW by batch", "no loss up to a batch of 32,868, SQuAD F1 90.584 at 64K/32K (You et al., "
                "arXiv 1904.00962); AdamW with tuning reaches 91.58 at 32K (Nado et al., arXiv 2102.06356)",
                *(here(task, "timm Lamb", "torch AdamW") for task in batches),
            ),
            line(
                "3-bit − exact GELU", "comparable (Novikov et al., arXiv 2202.00441)",
                *(here(task, "memkern 3-bit activations") for task in ("gpt", "fine-tune")),
            ),
            *(
                line(
                    f"randomized linear, {keep} − exact",
                    "moderate decrease of the accuracy (Bershatsky et al., arXiv 2201.13195)",
                    *(here(task, f"memkern linear={keep}") for task in ("gpt", "fine-tune")),
                )
                for keep in ("0.2", "0.1")
            ),
        ]
    )  # fmt: skip


TABLES: dict[str, Callable[[], str]] = {
    "evidence_summary": summary_table,
    "evidence_chance": chance,
    "evidence_cost": cost,
    "evidence_worse": worse_table,
    "evidence_papers": papers_table,
    "evidence_tasks": tasks_table,
}


def draw(path: Path = PICTURE) -> Path:
    """Loss against bytes per parameter, a panel for each task. Bars are the differences' standard errors."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(14, 6.4), layout="constrained")
    for axis, task in zip(axes.flat, TASKS, strict=True):
        _draw_task(axis, [compared()[task, name] for name in CONTENDERS], task)
    labels = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend([*labels.values()], [*labels], loc="outside lower center", ncols=len(labels) or 1, frameon=False)
    figure.supylabel("validation loss, mean of the seeds at the best rate", fontsize=10, color=FAINT)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _draw_task(axis: Any, contenders: list[Compared], task: str) -> None:
    ran = sorted((o for o in contenders if o.losses and math.isfinite(o.loss)), key=lambda o: o.loss)
    axis.set_title(task, fontsize=10, loc="left")
    axis.set_visible(bool(ran))
    axis.set_xlabel("weights and states, bytes per parameter", fontsize=8, color=FAINT)
    axis.grid(color=GRID)
    axis.spines[:].set_visible(False)
    if not ran:
        return
    best = ran[0].loss
    top = best + 2.5 * (ran[len(ran) // 2].loss - best) or best * 1.01
    for entry in ran:
        color, marker = STYLES[entry.contender.package]
        x = float(entry.row["bytes_per_param"])
        options = {"color": color, "label": entry.contender.package, "alpha": 0.75, "markersize": 5}
        if entry.loss > top:  # above the panel: the table has its loss
            axis.plot(x, top, marker="$\\uparrow$", linestyle="", **options)
        else:
            axis.errorbar(
                x,
                entry.loss,
                entry.difference.error if entry.difference else 0.0,
                marker=marker,
                linestyle="",
                linewidth=0.8,
                **options,
            )
    axis.set_ylim(best - 0.08 * (top - best), top + 0.04 * (top - best))


def write() -> None:
    """Writes docs/evidence.md and the picture."""
    PAGE.write_text(overview.fill(PAGE.read_text(), TABLES))
    print(PAGE, draw(), sep="\n")
