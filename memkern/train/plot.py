"""The picture of a run: loss curves, and beside them what the optimizer keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .checkpoint import replacing
from .config import TrainConfig
from .loop import RunResult
from .report import summary

# The baseline is a broad pale line that stays visible under ours where the two coincide.
STYLES = (("#9db4c0", 5.0), ("#c8553d", 1.6))
INK = "#253237"
GRID = "#dfe5e8"


def smoothed(values: Sequence[float]) -> list[float]:
    """Centred mean over a twentieth of the run: it lags behind nothing, unlike an exponential average."""
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
    axes.set_ylabel("loss, nats per byte")
    axes.grid(color=GRID, lw=0.8)
    axes.legend(frameon=False, fontsize=9)


def _state(axes: Axes, results: Sequence[RunResult], styles: Sequence[tuple[str, float]]) -> None:
    names = [result.optimizer for result in results]
    megabytes = [result.optimizer_bytes / 1e6 for result in results]
    bars = axes.bar(names, megabytes, color=[color for color, _ in styles], width=0.6)
    labels = [
        f"{mb:.1f} MB\n{r.bytes_per_parameter:.2f} B/param" for mb, r in zip(megabytes, results, strict=True)
    ]
    axes.bar_label(bars, labels, padding=4, fontsize=9, color=INK)
    axes.set_title("optimizer state", fontsize=10, color=INK)
    axes.set_ylim(0, max(megabytes) * 1.18)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False, labelleft=False, bottom=False)


def figure(config: TrainConfig, results: Sequence[RunResult]) -> Figure:
    """Training and validation losses over the steps, runs overlaid, and a bar of optimizer bytes for each."""
    styles = STYLES[-len(results) :]
    out = Figure(figsize=(10, 4.8), dpi=150, layout="constrained")
    curves, state = out.subplots(1, 2, width_ratios=(3, 1))
    for axes in (curves, state):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
        axes.set_axisbelow(True)
    _losses(curves, results, styles)
    _state(state, results, styles)
    layers, heads, width = config.shape
    out.suptitle(
        f"GPT {layers}x{heads}x{width}, {results[0].parameters / 1e6:.1f} M parameters: {summary(results)}",
        fontsize=11, color=INK,
    )  # fmt: skip
    return out


def write_png(path: Path, config: TrainConfig, results: Sequence[RunResult]) -> None:
    """Writes the figure to ``path``, atomically."""
    with replacing(path) as file:
        figure(config, results).savefig(file, format="png")
