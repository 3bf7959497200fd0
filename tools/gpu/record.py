"""Adds what `make gpu` found to benchmarks/results: ``python -m tools.gpu.record RESULTS.jsonl ...``.

Times of headline.py go to headline_HARDWARE.csv, for the tables of docs/benchmarks.md; those of models.py, recipe.py,
profile.py and tune.py to gpu-models.csv, gpu-recipe.csv, gpu-profile.csv and gpu-tune.csv; what passed and failed to
gpu-parts.csv.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import memkern
from benchmarks import RESULTS, machine, report
from benchmarks.harness import Result

MODELS = (
    *("model", "sequences", "tokens", "precision", "mode", "ms", "kernels_ms", "saved_mib", "peak_mib"),
    *("model_mib", "gradient_error", "cosine", "error"),
)
RECIPE = (
    *("run", "parameters", "sequences", "tokens", "limit_gib", "allocated_gib", "reserved_gib", "step_s"),
    *("tokens_per_s", "losses", "error"),
)
PROFILE = (
    *("group", "kernel", "time", "read", "written", "dram_percent", "issue_slots_percent"),
    *("occupancy_percent", "registers", "instructions", "blocks", "stalls"),
)
TUNE = ("kind", "setting", "case", "ms", "copy_share", "copy_rate_gbps")
PARTS = ("part", "result", "seconds", "equal", "near", "failed", "reason")
Row = dict[str, Any]


def read(paths: Iterable[Path]) -> Iterator[tuple[Path, Row, list[Row]]]:
    """Each file with what its results are of, and its rows."""
    for path in paths:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        about = next(row for row in rows if row["part"] == "environment")
        yield path, about, [row for row in rows if row is not about]


def provenance(path: Path, about: Row, commit: str | None, dirty: bool) -> dict[str, str]:
    name, driver, *_ = about["gpu"].split(", ")
    date = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.timezone.utc)
    return {
        "date": date.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit or about["commit"],
        "dirty": "yes" if dirty else "no",
        "hardware": f"{name}, driver {driver}",
        "python": about["python"],
        "torch": about["torch"],
        "memkern": memkern.__version__,
    }


def text(row: Row, columns: Iterable[str]) -> dict[str, str]:
    values = {name: row.get(name) for name in columns}
    return {
        name: "" if x is None else " ".join(map(str, x)) if isinstance(x, list) else str(x)
        for name, x in values.items()
    }


def with_stalls(row: Row) -> Row:
    """A row of profile.py with its stalls in one column, the longest first."""
    stalls = {k.removeprefix("stalled "): v for k, v in row.items() if k.startswith("stalled ")}
    longest = sorted(stalls, key=lambda name: -stalls[name])
    return row | {"stalls": "; ".join(f"{name} {stalls[name]}" for name in longest)}


def outcomes(rows: list[Row]) -> Iterator[Row]:
    """A row for each part that ran: its result, and the counts of its cases."""
    for part in [row for row in rows if "result" in row]:
        counts: Counter[str] = Counter()
        for row in rows:
            if row["part"] == part["part"] and "equal" in row and "result" not in row:
                counts.update({name: row[name] for name in ("equal", "near", "failed")})
        yield part | {"seconds": round(part["seconds"], 1)} | counts


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.record", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="results.jsonl of `make gpu`")
    parser.add_argument("--commit", help="that was measured, where the copy did not know")
    parser.add_argument("--dirty", action="store_true", help="with changes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder (default: benchmarks/results)")
    args = parser.parse_args(argv)
    for path, about, rows in read(args.results):
        of = provenance(path, about, args.commit, args.dirty)
        times = [
            Result(**{k: v for k, v in row.items() if k != "part"})
            for row in rows
            if row["part"] == "headline" and "case" in row
        ]
        if times:
            name = f"headline_{machine.slug(of['hardware'])}.csv"
            report.append(args.out / name, report.rows(of, times))
        for part, key, columns in (
            ("models", "mode", MODELS),
            ("recipe", "run", RECIPE),
            ("profile", "kernel", PROFILE),
            ("tune", "copy_share", TUNE),
        ):
            of_part = [row for row in rows if row["part"] == part and key in row]
            found = [of | text(with_stalls(row) if part == "profile" else row, columns) for row in of_part]
            if found:
                report.append(args.out / f"gpu-{part}.csv", found, (*report.PROVENANCE, *columns))
        found = [of | text(row, PARTS) for row in outcomes(rows)]
        report.append(args.out / "gpu-parts.csv", found, (*report.PROVENANCE, *PARTS))


if __name__ == "__main__":
    main()
