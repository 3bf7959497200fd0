"""Draws a results file: time per parameter or element, and the time of moving its bytes at copy bandwidth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import OPTIMIZER_TOPICS, Row, latest, title, topic_of

OURS, OTHERS, FLOOR, FAINT, GRID = "#0b7285", "#adb5bd", "#e8590c", "#868e96", "#e9ecef"
INCHES_PER_BAR = 0.28


def draw(csv_path: Path) -> Path:
    """Draws the last run of each case in the CSV into a PNG beside it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    topic = topic_of(csv_path)
    cases = list(latest(csv_path).values())
    heights = [len(case_rows) + 1.6 for case_rows in cases]
    figure, axes = plt.subplots(
        len(cases),
        figsize=(9, INCHES_PER_BAR * sum(heights) + 0.9),
        height_ratios=heights,
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, case_rows in zip(axes.flat, cases, strict=True):
        _draw_case(axis, case_rows, topic)
    marks = [mark for case_rows in cases for row in case_rows if row["ms_median"] for mark in _marks(row)]
    last = axes.flat[-1]
    last.set_xscale("log")
    last.set_xlim(min(marks, default=1) / 1.5, max(marks, default=1) * 2)
    last.xaxis.set_major_formatter("{x:g}")
    unit = "parameter" if topic in OPTIMIZER_TOPICS else "element"
    last.set_xlabel(f"ns per {unit}, logarithmic; orange: its bytes at copy bandwidth", color=FAINT)
    hardware = cases[0][0]["hardware"]
    figure.suptitle(f"{topic}  ·  {hardware}", x=0.01, ha="left", fontsize=12, fontweight="bold")
    png = csv_path.with_suffix(".png")
    figure.savefig(png, dpi=140)
    plt.close(figure)
    return png


def _marks(row: Row) -> tuple[float, float, float, float]:
    """ns per parameter or element: at copy bandwidth, p20, median, p80."""
    low, high = (float(row[q]) * 1e6 / int(row["numel"]) for q in ("ms_p20", "ms_p80"))
    floor = float(row["bytes_per_param"]) / float(row["copy_rate_gbps"])
    return floor, low, float(row["ns_per_param"]), high


def _draw_case(axis: Any, case_rows: list[Row], topic: str) -> None:
    axis.set_title(title(case_rows, topic), fontsize=10, loc="left")
    for y, row in enumerate(case_rows):
        if not row["ms_median"]:
            across = axis.get_yaxis_transform()
            axis.text(0.01, y, "absent", transform=across, va="center", color=FAINT, fontsize=9)
            continue
        floor, low, time, high = _marks(row)
        axis.barh(y, time, height=0.72, color=OURS if row["contender"].startswith("memkern") else OTHERS)
        axis.hlines(y, low, high, color="black", linewidth=1)
        axis.vlines(floor, y - 0.42, y + 0.42, color=FLOOR, linewidth=2)
        axis.text(max(high, floor) * 1.06, y, f"{time:.3g}", va="center", fontsize=9)
    axis.set_yticks(range(len(case_rows)), [row["contender"] for row in case_rows], fontsize=9)
    axis.set_ylim(len(case_rows) - 0.5, -0.6)
    axis.spines[:].set_visible(False)
    axis.tick_params(which="both", length=0)
    axis.grid(axis="x", color=GRID)
    axis.set_axisbelow(True)
