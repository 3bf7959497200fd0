"""python -m benchmarks.closed_loop: what 8-bit states do to Adam's updates, beside earlier figures.

No hardware is measured: the figures depend on the arithmetic and the seeds only. The short streams run on three seeds,
and their error is the mean over all steps. The long ones run on one seed, and their error is the last step's, because
a state that drifts slowly is wrong only then. "expected" are the figures of the prototype that the codecs were chosen
by: other seeds, and in the dynamic map's short runs blocks of 256, where these are of 128.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from . import machine, report, streams

CODECS = ("power", "dynamic")
COLUMNS = (
    *report.PROVENANCE,
    "stream",
    "beta2",
    "steps",
    "seeds",
    "codec",
    "error",
    "sqrt_v_ratio",
    "expected",
)


class Setting(NamedTuple):
    stream: str
    beta2: float
    steps: int
    seeds: int
    expected: dict[
        str, float
    ]  # the prototype's error, by codec; its power codec had no dither in the short runs


SETTINGS = (
    Setting("base", 0.999, 1000, 3, {"power": 0.055, "dynamic": 0.083}),
    Setting("base", 0.95, 1000, 3, {"power": 0.034, "dynamic": 0.053}),
    Setting("heterogeneous", 0.999, 1000, 3, {"power": 0.60, "dynamic": 120}),
    Setting("drop", 0.999, 1000, 3, {"power": 0.050, "dynamic": 0.077}),
    Setting("sparse", 0.999, 1000, 3, {"power": 0.017, "dynamic": 3.8}),
    Setting("tiny", 0.999, 1000, 3, {"power": 0.048, "dynamic": 0.072}),
    Setting("equal", 0.999, 6000, 1, {"power": 0.042, "dynamic": 0.040}),
    Setting("log-sd 0.5", 0.999, 6000, 1, {"power": 0.061, "dynamic": 0.072}),
    Setting("one stays large", 0.999, 6000, 1, {"power": 0.083, "dynamic": 0.811}),
)


def measure(setting: Setting, codec: str) -> tuple[float, float]:
    """(error, sqrt(v) ratio), averaged over the seeds."""
    from memkern.optim import Adam8bit

    factory = functools.partial(Adam8bit, codec=codec)
    runs = [
        streams.closed_loop(factory, streams.make(setting.stream, setting.steps, seed), (0.9, setting.beta2))
        for seed in range(setting.seeds)
    ]
    long = setting.steps > 1000
    errors = [run.last_error if long else run.mean_error for run in runs]
    return sum(errors) / len(runs), sum(run.sqrt_v_ratio for run in runs) / len(runs)


def results() -> Iterator[dict[str, str]]:
    provenance = machine.provenance("cpu")
    settings = [(setting, codec) for setting in SETTINGS for codec in CODECS]
    for setting, codec in track(settings, "streams", transient=True):
        error, ratio = measure(setting, codec)
        values = (*setting[:4], codec, f"{error:.4g}", f"{ratio:.4g}", setting.expected[codec])
        yield provenance | dict(zip(COLUMNS[-len(values) :], map(str, values), strict=True))


def table(rows: list[dict[str, str]]) -> Table:
    table = Table(title="Relative L2 error of Adam's update, 8-bit states", title_justify="left")
    shown = ("stream", "beta2", "steps", "codec", "error", "expected", "sqrt_v_ratio")
    for heading in ("stream", "beta2", "steps", "codec", "error", "expected", "sqrt(v) / true"):
        table.add_column(heading, justify="left" if heading in ("stream", "codec") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in shown), style="bold cyan" if row["codec"] == "power" else "")
    return table


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.closed_loop", description=__doc__)
    default = Path(__file__).parent / "results"
    parser.add_argument("--out", type=Path, default=default, help="folder (default: benchmarks/results)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # 16,384 elements: a second thread costs more than it brings
    rows = list(results())
    path = args.out / "closed-loop.csv"
    report.append(path, rows, COLUMNS)
    console = Console()
    console.print(table(rows))
    console.print(path)


if __name__ == "__main__":
    main()
