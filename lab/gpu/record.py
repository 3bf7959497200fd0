"""Adds the rows that `make gpu` measured to the results: ``python -m lab.gpu.record RESULTS.jsonl ...``.

Rows of headline.py, models.py and compiled.py go to benchmarks/results, for the tables of docs/:
headline_HARDWARE.csv, gpu-models.csv, gpu-compiled.csv. Those of recipe.py (its parts are "recipe" and "stream") and of
host.py go to lab/results (gpu-recipe.csv and so on), and each part's result (passed, failed or timed out) to
gpu-parts.csv there.
Results of a tree with uncommitted changes are refused.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import benchmarks
import lab
import memkern
from benchmarks import machine, report
from benchmarks.harness import Result

# The columns of the results, by part of `make gpu`.
MODELS = (
    *("model", "sequences", "tokens", "precision", "mode", "ms", "kernels_ms", "saved_mib", "peak_mib"),
    *("model_mib", "gradient_error", "cosine", "error"),
)
COMPILED = (*MODELS[:-1], "fp32_error", "first_s", "error")
RECIPE = (
    *("model", "run", "parameters", "sequences", "tokens", "limit_gib", "allocated_gib", "reserved_gib", "device_gib"),
    *("made_s", "step_s", "tokens_per_s", "busy", "losses", "error"),
)
HOST = ("way", "parameters", "ms", "states", "gb_per_s", "device_bytes_beside", "error")
PARTS = ("part", "result", "seconds")
Row = dict[str, Any]


def read(paths: Iterable[Path]) -> Iterator[tuple[Path, Row, list[Row]]]:
    """Each file, its first row (lab.gpu.__main__.environment), and its other rows."""
    for path in paths:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        environment = next(row for row in rows if row["part"] == "environment")
        yield path, environment, [row for row in rows if row is not environment]


def provenance(path: Path, environment: Row, commit: str | None) -> dict[str, str]:
    name, driver, *_ = environment["gpu"].split(", ")
    date = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.timezone.utc)
    return {
        "date": date.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit or environment["commit"],
        "dirty": "no",  # main() refuses dirty results
        "hardware": f"{name}, driver {driver}",
        "python": environment["python"],
        "torch": environment["torch"],
        "memkern": memkern.__version__,
    }


def refuse_dirty(parser: argparse.ArgumentParser, path: Path, environment: Row, commit: str | None) -> None:
    """Ends the program unless the results were measured at a commit, without changes to it."""
    if environment.get("dirty"):
        parser.error(f"{path} was measured with uncommitted changes: commit them and measure again")
    if not (commit or environment.get("commit")):
        parser.error(f"{path} does not say which commit was measured: give --commit where the tree had no changes")


def text(value: Any) -> str:
    """A cell of a CSV file."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is None else str(value)


def cells(row: Row, columns: Iterable[str]) -> dict[str, str]:
    return {name: text(row.get(name)) for name in columns}


def append(path: Path, new: list[Row], columns: Iterable[str]) -> None:
    """Adds rows to a file, and columns that its earlier rows lack."""
    earlier = report.read(path) if path.exists() else []
    path.unlink(missing_ok=True)
    report.append(path, [*earlier, *new], [*dict.fromkeys([*(earlier[0] if earlier else ()), *columns])])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.gpu.record", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="results.jsonl of `make gpu`")
    parser.add_argument("--commit", help="the commit that was measured, where the results do not say")
    parser.add_argument("--out", type=Path, help="folder for all files")
    args = parser.parse_args(argv)
    results = list(read(args.results))
    for path, environment, _ in results:
        refuse_dirty(parser, path, environment, args.commit)
    for path, environment, rows in results:
        measured_with = provenance(path, environment, args.commit)
        times = [
            Result(**{name: value for name, value in row.items() if name != "part"})
            for row in rows
            if row["part"] == "headline" and "case" in row
        ]
        if times:
            name = f"headline_{machine.slug(measured_with['hardware'])}.csv"
            report.append((args.out or benchmarks.RESULTS) / name, report.rows(measured_with, times))
        for part, key, columns in (  # rows without the key are of the part itself
            ("models", "mode", MODELS),
            ("compiled", "mode", COMPILED),
            ("recipe", "run", RECIPE),
            ("stream", "run", RECIPE),
            ("host", "way", HOST),
        ):
            part_rows = [row for row in rows if row["part"] == part and key in row]
            if new := [measured_with | cells(row, columns) for row in part_rows]:
                folder = args.out or (benchmarks.RESULTS if part in ("models", "compiled") else lab.RESULTS)
                append(folder / f"gpu-{part}.csv", new, (*report.PROVENANCE, *columns))
        new = [measured_with | cells(row, PARTS) for row in rows if "result" in row]
        append((args.out or lab.RESULTS) / "gpu-parts.csv", new, (*report.PROVENANCE, *PARTS))


if __name__ == "__main__":
    main()
