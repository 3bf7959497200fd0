"""Batches x1, x8 and x32 at scaled rates, and LAMB's 8-bit states beside 32-bit ones.

A byte-level GPT (memkern.train) sees the same tokens in steps of 1, 8 and 32 times the base batch, with AdamW, LAMB and
LAMB8bit, at rates scaled by the square root of the factor from one that is usual for the base batch; nothing else is
tuned. Then LAMB and LAMB8bit run for 500 steps of the base batch, with seeds of their own: noise is the standard
deviation over seeds of LAMB's loss, the difference that of the two at the same seed. No hardware is measured.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import machine, report
from benchmarks.plot import FAINT, GRID, OTHERS, OURS
from lab.studies import study

COLUMNS = (
    *report.PROVENANCE,
    "part",
    "optimizer",
    "factor",
    "lr",
    "seed",
    "steps",
    "step",
    "tokens",
    "validation_loss",
)
OPTIMIZERS = {"adamw": 3e-3, "lamb": 1e-2, "lamb8bit": 1e-2}  # rates of the base batch
STYLES = {"adamw": "-", "lamb": "-", "lamb8bit": "--"}
COLORS = {"adamw": OTHERS, "lamb": "#e8590c", "lamb8bit": OURS}


@dataclasses.dataclass(frozen=True)
class Setting:
    layers: int = 2
    heads: int = 2
    width: int = 64
    seq_len: int = 64
    batch_size: int = 8
    steps: int = 1280  # of the base batch
    factors: tuple[int, ...] = (1, 8, 32)
    seeds: int = 2
    parity_steps: int = 500
    parity_seeds: int = 4
    points: int = 10  # of each curve
    eval_tokens: int = 65536

    def config(self, optimizer: str, seed: int, steps: int, factor: int = 1) -> Any:
        from memkern import Techniques
        from memkern.train import TrainConfig

        bits = 8 if optimizer.endswith("8bit") else 32
        techniques = Techniques(optimizer=optimizer.removesuffix("8bit"), state_bits=bits, micro_batch=self.batch_size)
        return TrainConfig(
            layers=self.layers, heads=self.heads, width=self.width, seq_len=self.seq_len,
            techniques=techniques, batch_factor=factor, lr_rule="sqrt", lr=OPTIMIZERS[optimizer],
            seed=seed, steps=steps, warmup=max(1, steps // 10),
            eval_every=max(1, steps // self.points), eval_tokens=self.eval_tokens,
        )  # fmt: skip


def results(setting: Setting) -> Iterator[dict[str, str]]:
    """A row for each validation of each run."""
    from memkern.train import Trainer, load_corpus, run

    provenance = machine.provenance("cpu")
    corpus = load_corpus((), seq_len=setting.seq_len)
    runs = [
        ("large batch", name, setting.config(name, seed, setting.steps // factor, factor))
        for seed in range(setting.seeds)
        for factor in setting.factors
        for name in OPTIMIZERS
    ]
    runs += [
        ("parity", name, setting.config(name, 100 + seed, setting.parity_steps))
        for seed in range(setting.parity_seeds)
        for name in ("lamb", "lamb8bit")
    ]
    for part, name, config in track(runs, "runs", transient=True):
        trainer = Trainer(config, corpus)
        run([trainer])
        for step, loss in trainer.history.validation:
            values = (
                part, name, config.batch_factor, f"{config.peak_lr:.4g}", config.seed, config.steps, step,
                step * config.tokens_per_step, f"{loss:.5f}",
            )  # fmt: skip
            yield study.row(provenance, COLUMNS, [*map(str, values)])


def losses(rows: list[dict[str, str]], part: str) -> dict[tuple[str, int], dict[int, list[float]]]:
    """The validation losses of a part by (optimizer, factor), then by tokens seen: a number per seed, in order."""
    found: dict[tuple[str, int], dict[int, list[float]]] = {}
    for row in rows:
        if row["part"] == part:
            curve = found.setdefault((row["optimizer"], int(row["factor"])), {})
            curve.setdefault(int(row["tokens"]), []).append(float(row["validation_loss"]))
    return found


def last(curve: dict[int, list[float]]) -> list[float]:
    return curve[max(curve)]


def table(rows: list[dict[str, str]]) -> Table:
    shown = Table(title="Validation loss after the same tokens, nats per byte", title_justify="left")
    shown.add_column("batch")
    for name in OPTIMIZERS:
        shown.add_column(name, justify="right")
    found = losses(rows, "large batch")
    for factor in sorted({factor for _, factor in found}):
        cells = [found[name, factor] for name in OPTIMIZERS]
        shown.add_row(f"x{factor}", *(f"{statistics.mean(last(cell)):.4f}" for cell in cells))
    return shown


def parity(rows: list[dict[str, str]]) -> str:
    """8-bit and 32-bit LAMB: their largest difference over the curve, beside the noise over seeds."""
    found = losses(rows, "parity")
    ours, full = found["lamb8bit", 1], found["lamb", 1]
    difference = max(abs(statistics.mean(ours[t]) - statistics.mean(full[t])) for t in full)
    noise = min(statistics.stdev(values) for values in full.values())
    return (
        f"LAMB8bit's mean loss over {len(last(full))} seeds is within {difference:.4f} of LAMB's at every validation; "
        f"the least standard deviation over seeds is {noise:.4f}."
    )


def draw(rows: list[dict[str, str]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    found = losses(rows, "large batch")
    factors = sorted({factor for _, factor in found})
    figure, axes = plt.subplots(1, len(factors) + 1, figsize=(12, 3.2), sharey=True, layout="constrained")
    for axis, factor in zip(axes, factors, strict=False):
        for name in OPTIMIZERS:
            curve = found[name, factor]
            means = [statistics.mean(v) for v in curve.values()]
            axis.plot(list(curve), means, label=name, color=COLORS[name], linestyle=STYLES[name])
        axis.set_title(f"batch x{factor}", fontsize=10, loc="left")
    for name in ("lamb", "lamb8bit"):
        for seed, values in enumerate(zip(*losses(rows, "parity")[name, 1].values(), strict=True)):
            label = name if seed == 0 else None
            axes[-1].plot(
                list(losses(rows, "parity")[name, 1]),
                values,
                color=COLORS[name],
                linestyle=STYLES[name],
                label=label,
                linewidth=1,
            )
    axes[-1].set_title("8-bit and 32-bit LAMB, each seed", fontsize=10, loc="left")
    for axis in axes:
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1000:g}k")
        axis.set_xlabel("tokens", color=FAINT)
        axis.spines[:].set_visible(False)
        axis.grid(color=GRID)
        axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("validation loss, nats per byte", color=FAINT)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def main(argv: list[str] | None = None, setting: Setting | None = None) -> None:
    parser = study.parser("large_batch", __doc__)
    args = parser.parse_args(argv)
    rows = list(results(setting or Setting()))
    path = args.out / "large-batch.csv"
    report.append(path, rows, COLUMNS)
    draw(rows, path.with_suffix(".png"))
    console = Console()
    console.print(table(rows))
    console.print(parity(rows))
    console.print(path)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the matrices are small
    main()
