"""The error that 8-bit states add to Adam's updates.

No hardware is measured: the figures depend on the arithmetic and the seeds only. The short streams run on three seeds,
and their error is the mean over all steps. The long ones run on one seed, and their error is the last step's, because
a state that drifts slowly is wrong only then. The total error is that of the sum of all updates.

A second table is of elements that fall quiet beside live ones of their block (quiet.py): what becomes of
them with fp32 states, and with those of 8 bits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import machine, report
from lab.studies import study
from tests.support import gradient_streams as streams
from tests.support import quiet

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
    "total_error",
)
QUIET_COLUMNS = (*report.PROVENANCE, "case", "figure", "fp32", *CODECS)


class Setting(NamedTuple):
    stream: str
    beta2: float
    steps: int
    seeds: int


SETTINGS = (
    Setting("base", 0.999, 1000, 3),
    Setting("base", 0.95, 1000, 3),
    Setting("heterogeneous", 0.999, 1000, 3),
    Setting("drop", 0.999, 1000, 3),
    Setting("sparse", 0.999, 1000, 3),
    Setting("tiny", 0.999, 1000, 3),
    Setting("equal", 0.999, 6000, 1),
    Setting("log-sd 0.5", 0.999, 6000, 1),
    Setting("one stays large", 0.999, 6000, 1),
)


Figure = Callable[[quiet.Factory], float]

# case, figure, how it is measured
QUIET: list[tuple[str, str, Figure]] = [
    (
        f"one gradient, {kind} neighbours x{x}",
        "mean movement",
        functools.partial(quiet.one_gradient, neighbours=x, noisy=kind == "noisy"),
    )
    for kind, x in itertools.product(("noisy", "constant"), (1, 10, 100, 1000))
]
QUIET += [
    (
        f"a gradient every {every} steps, neighbours x{x}",
        "mean movement",
        functools.partial(quiet.one_gradient, neighbours=x, noisy=True, every=every),
    )
    for every, x in itertools.product((50, 500), (1, 1000))
]
QUIET += [
    (
        f"features in 1 step of {every}, neighbours x{x}",
        "rms movement",
        functools.partial(quiet.rare_features, every=every, neighbours=x),
    )
    for every, x in itertools.product((50, 500), (1, 10))
]
QUIET += [
    ("bag of words", "largest |weight|", lambda factory: quiet.bag_of_words(factory).max_weight),
    ("bag of words", "loss", lambda factory: quiet.bag_of_words(factory).loss),
]
MOMENTA = (("Lion", 0.99), ("LARS", 0.9))


def measure(setting: Setting, codec: str) -> tuple[float, float, float]:
    """(error, sqrt(v) ratio, total error), averaged over the seeds."""
    from memkern.optim import Adam8bit

    factory = functools.partial(Adam8bit, codec=codec)
    runs = [
        streams.closed_loop(factory, streams.make(setting.stream, setting.steps, seed), (0.9, setting.beta2))
        for seed in range(setting.seeds)
    ]
    long = setting.steps > 1000
    errors = [run.last_error if long else run.mean_error for run in runs]
    ratios, totals = ([getattr(run, name) for run in runs] for name in ("sqrt_v_ratio", "total_error"))
    return sum(errors) / len(runs), sum(ratios) / len(runs), sum(totals) / len(runs)


def results() -> Iterator[dict[str, str]]:
    provenance = machine.provenance("cpu")
    settings = [(setting, codec) for setting in SETTINGS for codec in CODECS]
    for setting, codec in track(settings, "streams", transient=True):
        error, ratio, total = measure(setting, codec)
        values = (*setting, codec, f"{error:.4g}", f"{ratio:.4g}", f"{total:.4g}")
        yield study.row(provenance, COLUMNS, [*map(str, values)])


def quiet_results() -> Iterator[dict[str, str]]:
    from memkern import optim

    provenance = machine.provenance("cpu")
    adams: dict[str, quiet.Factory] = {
        "fp32": functools.partial(torch.optim.AdamW, weight_decay=0.0),
        **{codec: functools.partial(optim.AdamW8bit, weight_decay=0.0, codec=codec) for codec in CODECS},
    }
    for case, figure, measure_one in track(QUIET, "quiet elements", transient=True):
        values = {name: f"{measure_one(factory):.4g}" for name, factory in adams.items()}
        yield provenance | {"case": case, "figure": figure} | values
    for name, beta in MOMENTA:
        factories: dict[str, quiet.Factory] = {"fp32": getattr(optim, name)}
        for codec in CODECS:
            factories[codec] = functools.partial(getattr(optim, f"{name}8bit"), codec=codec)
        values = {key: f"{quiet.quiet_momentum(factory, beta):.4g}" for key, factory in factories.items()}
        case = f"{name}, gradients fall to a hundredth"
        yield provenance | {"case": case, "figure": "|m| / true"} | values


def table(rows: list[dict[str, str]]) -> Table:
    table = Table(title="Relative L2 error of Adam's update, 8-bit states", title_justify="left")
    shown = ("stream", "beta2", "steps", "codec", "error", "total_error", "sqrt_v_ratio")
    headings = ("stream", "beta2", "steps", "codec", "error", "total error", "sqrt(v) / true")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("stream", "codec") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in shown), style="bold cyan" if row["codec"] == "power" else "")
    return table


def quiet_table(rows: list[dict[str, str]]) -> Table:
    table = Table(title="Elements that fall quiet", title_justify="left")
    for heading in QUIET_COLUMNS[len(report.PROVENANCE) :]:
        table.add_column(heading, justify="left" if heading in ("case", "figure") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in QUIET_COLUMNS[len(report.PROVENANCE) :]))
    return table


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("closed_loop", __doc__)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # 16,384 elements: a second thread costs more than it brings
    console = Console()
    for name, columns, made, show in (
        ("closed-loop.csv", COLUMNS, results(), table),
        ("quiet-elements.csv", QUIET_COLUMNS, quiet_results(), quiet_table),
    ):
        rows = list(made)
        report.append(args.out / name, rows, columns)
        console.print(show(rows))
        console.print(args.out / name)


if __name__ == "__main__":
    main()
