"""python -m benchmarks: runs the benchmarks, prints a table per case, writes the CSV and draws it.

python -m benchmarks table: writes the tables of the README and of docs/benchmarks.md, and the README's picture, from
the results that are there.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any

import benchmarks

BYTES_PER_PARAMETER = 120  # on a GPU: what all contenders of the largest case together allocate per parameter
PAGES = ("README.md", "docs/benchmarks.md", "docs/choosing.md", "docs/compiled.md")
QUICK_SIZE, QUICK_ROUNDS, QUICK_SECONDS = 2**16, 2, 0.2  # with --quick: elements, rounds, seconds per contender


def topics() -> list[str]:
    names = [module.name for module in pkgutil.iter_modules(benchmarks.__path__)]
    return [name.removeprefix("bench_") for name in names if name.startswith("bench_")]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("action", nargs="?", choices=("run", "table"), default="run")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", choices=topics(), help="one topic")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--size",
        type=int,
        help="parameters or elements of a case (default: 2**24; on a GPU 10**9, or what fits)",
    )
    parser.add_argument("--rounds", type=int, default=30, help="interleaved rounds per case (default: 30)")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it runs; not into results/")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results, with --quick out/bench")
    pages = ", ".join(PAGES)
    parser.add_argument("--page", type=Path, help=f"what `table` rewrites (default: {pages} and the picture)")
    return parser


def default_size(device: str) -> int:
    """Parameters or elements of a case: larger than any cache, small enough that all its contenders fit in memory."""
    if device == "cpu":
        return 2**24
    import torch

    return min(10**9, torch.cuda.get_device_properties(0).total_memory // BYTES_PER_PARAMETER)


def run(args: argparse.Namespace, out: Path) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from . import harness, machine, plot, report

    size = QUICK_SIZE if args.quick else args.size or default_size(args.device)
    rounds = QUICK_ROUNDS if args.quick else args.rounds
    seconds = {"seconds": QUICK_SECONDS} if args.quick else {}
    provenance = machine.provenance(args.device)
    console = Console()
    if not console.is_terminal:  # a log: rich would fold the tables to 80 columns
        console = Console(width=140)
    console.print(" · ".join(f"{name} {value}" for name, value in provenance.items()), style="dim")
    clock = harness.Clock(args.device)
    # muted() redirects descriptor 2 while peers are set up: the bar writes to a copy of it
    with os.fdopen(os.dup(2), "w") as terminal:
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(file=terminal),
            transient=True,
        )
        for topic in [args.only] if args.only else topics():
            path = out / f"{topic}_{machine.slug(provenance['hardware'])}.csv"
            module = importlib.import_module(f"benchmarks.bench_{topic}")
            for case in module.cases(size, args.device):
                if args.case not in case.name:
                    continue
                with bar:
                    task = bar.add_task(case.name, total=len(case.contenders) + rounds)

                    def progress(activity: str, task: Any = task, name: str = case.name) -> None:
                        bar.update(task, advance=1, description=f"{name}: {activity}")

                    results = harness.measure(case, clock, rounds=rounds, progress=progress, **seconds)
                    bar.remove_task(task)
                case_rows = report.rows(provenance, results)
                report.append(path, case_rows)
                console.print(report.case_table(case_rows, topic))
            if path.exists():
                console.print(f"{path}\n{plot.draw(path)}")


def filled(page: Path, out: Path) -> str:
    """A page with the tables of the results in ``out``."""
    from . import overview, report

    csv_paths = {topic: sorted(out.glob(f"{topic}_*.csv")) for topic in (*topics(), "headline")}
    root = "../" if page.parent.name == "docs" else ""
    return overview.fill(report.fill_markers(page.read_text(), csv_paths, root))


def write_tables(page: Path | None, out: Path) -> None:
    from . import machine, overview

    for path in [page] if page else [machine.ROOT / name for name in PAGES]:
        path.write_text(filled(path, out))
        print(path)
    if page is None:
        print(overview.draw())


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    # DeepSpeed runs ninja, which is in the virtual environment, whose bin folder may not be on PATH
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    # torch takes large tensors from huge pages then, for all contenders: the page faults of fresh results would
    # otherwise cost more than what an activation computes. torch reads it when it first allocates.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    out = args.out or (Path("out/bench") if args.quick else benchmarks.RESULTS)
    if args.action == "table":
        write_tables(args.page, out)
    else:
        run(args, out)


if __name__ == "__main__":
    main()
