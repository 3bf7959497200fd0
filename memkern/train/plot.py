"""The picture of a run: loss curves, and the bytes of the optimizer's state and of what is saved for backward."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .config import TrainConfig
from .loop import RunResult
from .paths import replacing
from .phases import Phases
from .report import summary

# The baseline is a broad pale line that stays visible under ours where the two coincide.
STYLES = (("#9db4c0", 5.0), ("#c8553d", 1.6))
INK = "#253237"
GRID = "#dfe5e8"


def smoothed(values: Sequence[float]) -> list[float]:
    """Centred mean over a twentieth of the run; unlike an exponential average it does not lag."""
    reach = len(values) // 40
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _losses(axes: Axes, results: Sequence[RunResult], styles: Sequence[tuple[str, float]]) -> None:
    for result, (color, width) in zip(results, styles, strict=True):
        losses = smoothed(result.history.train_loss)
        axes.plot(
            range(1, len(losses) + 1), losses, color=color, lw=width, solid_capstyle="round",
            label=f"{result.optimizer}, training (smoothed)",
        )  # fmt: skip
    for result, (color, width) in zip(results, styles, strict=True):
        steps = [step for step, _ in result.history.validation]
        losses = [loss for _, loss in result.history.validation]
        axes.plot(
            steps, losses, ls="none", marker="o", ms=6 + width, mfc=color, mec="white", mew=1.2, zorder=3,
            label=f"{result.optimizer}, validation {losses[-1]:.4f}",
        )  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, nats per {results[0].unit}")
    axes.grid(color=GRID, lw=0.8)
    axes.legend(frameon=False, fontsize=9)


def _bars(
    axes: Axes,
    styles: Sequence[tuple[str, float]],
    title: str,
    names: Sequence[str],
    bars: Sequence[tuple[int, str]],
) -> None:
    """bars: bytes, and the text below the number."""
    megabytes = [count / 1e6 for count, _ in bars]
    # By position: two runs may have one name.
    drawn = axes.bar(range(len(bars)), megabytes, color=[color for color, _ in styles], width=0.6)
    axes.set_xticks(range(len(bars)), names)
    labels = [f"{mb:.1f} MB\n{text}" for mb, (_, text) in zip(megabytes, bars, strict=True)]
    axes.bar_label(drawn, labels, padding=4, fontsize=9, color=INK)
    axes.set_title(title, fontsize=10, color=INK)
    axes.set_ylim(0, max(megabytes) * 1.18)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False, labelleft=False, bottom=False)


def model_name(config: TrainConfig) -> str:
    if config.is_preset:
        return "GPT " + "x".join(map(str, config.shape))
    return Path(config.model).name


def memory_figure(config: TrainConfig, phases: Phases) -> Figure:
    """Memory over time, and the peak of each phase."""
    out = Figure(figsize=(12, 4.2), dpi=150, layout="constrained")
    curve, bars = out.subplots(1, 2, width_ratios=(3, 2))
    for axes in (curve, bars):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
        axes.set_axisbelow(True)
    color = STYLES[-1][0]
    seconds, values = zip(*phases.curve, strict=True)
    curve.plot(seconds, [value / 2**30 for value in values], color=color, lw=1)
    curve.set_ylim(bottom=0)
    curve.set_xlabel("seconds")
    curve.set_ylabel("allocated, GiB" if phases.device.type == "cuda" else "resident set, GiB")
    curve.grid(color=GRID, lw=0.8)
    rows = phases.table
    drawn = bars.bar(range(len(rows)), [row.peak / 2**30 for row in rows.values()], color=color, width=0.6)
    bars.set_xticks(range(len(rows)), list(rows))
    bars.bar_label(drawn, [f"{row.peak / 2**30:.2f}" for row in rows.values()], padding=3, fontsize=9, color=INK)
    bars.set_title("peak of each phase, GiB", fontsize=10, color=INK)
    out.suptitle(f"{model_name(config)}, {config.techniques.label}", fontsize=11, color=INK)
    return out


def write_memory_png(path: Path, config: TrainConfig, phases: Phases) -> None:
    """Writes the figure to ``path``, atomically."""
    with replacing(path) as temporary:
        memory_figure(config, phases).savefig(temporary, format="png")


def figure(config: TrainConfig, results: Sequence[RunResult]) -> Figure:
    """Training and validation losses over the steps, runs overlaid; bars of state bytes and of saved bytes."""
    styles = STYLES[-len(results) :]
    out = Figure(figsize=(12, 4.8), dpi=150, layout="constrained")
    curves, state_bars, saved_bars = out.subplots(1, 3, width_ratios=(3, 1, 1))
    for axes in (curves, state_bars, saved_bars):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
        axes.set_axisbelow(True)
    _losses(curves, results, styles)
    tokens = config.techniques.micro_batch * config.seq_len
    states = [(r.optimizer_bytes, f"{r.bytes_per_parameter:.2f} B/param") for r in results]
    _bars(state_bars, styles, "optimizer state", [r.optimizer for r in results], states)
    saved = [(r.saved_bytes, f"{r.saved_bytes / tokens / 1e3:.1f} kB/token") for r in results]
    _bars(
        saved_bars,
        styles,
        "saved for the backward pass",
        [r.activations.replace(", ", ",\n") for r in results],
        saved,
    )
    title = f"{model_name(config)}, {results[0].parameters / 1e6:.1f} M parameters: {summary(results)}"
    out.suptitle(textwrap.fill(title, 110), fontsize=11, color=INK)
    return out


def write_png(path: Path, config: TrainConfig, results: Sequence[RunResult]) -> None:
    """Writes the figure to ``path``, atomically."""
    with replacing(path) as temporary:
        figure(config, results).savefig(temporary, format="png")
