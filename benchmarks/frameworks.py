"""python -m benchmarks.frameworks: the table of docs/frameworks.md, from the outcomes of the tests of each feature.

``make frameworks`` runs those tests (marked ``feature``), appends their outcomes to results/frameworks.csv, and calls
this. Another torch: ``TORCH=torch==2.10.0 VENV=... make frameworks``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from . import RESULTS, machine, report

COLUMNS = (*report.PROVENANCE, "framework", "version", "feature", "tests", "outcome")
CSV = RESULTS / "frameworks.csv"
PAGE = machine.ROOT / "docs" / "frameworks.md"
MARKERS = re.compile(r"(<!-- features -->\n).*?(<!-- /features -->)", re.DOTALL)
_PLAIN = re.compile(r"\d+(\.\d+)*")  # a version without its local part, such as +cpu


def row(framework: str, feature: str, outcomes: Sequence[str]) -> report.Row:
    """A feature's row: passed if every test has, failed if one has, else skipped."""
    outcome = next((worst for worst in ("failed", "skipped") if worst in outcomes), "passed")
    try:
        version = metadata.version(framework)
    except metadata.PackageNotFoundError:
        version = "absent"
    values = (framework, version, feature, str(len(outcomes)), outcome)
    return dict(zip(COLUMNS[-len(values) :], values, strict=True))


def _short(version: str) -> str:
    plain = _PLAIN.match(version)
    return plain[0] if plain else version


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, _short(version).split("."))) if _PLAIN.match(version) else ()


def table(rows: Sequence[report.Row]) -> str:
    """Features by row, versions of torch by column: the outcome of the last run, and the framework's version then."""
    last = {(r["framework"], r["feature"], _short(r["torch"])): r for r in rows}
    torches = sorted({torch for *_, torch in last}, key=_order)
    features = sorted({(framework, feature) for framework, feature, _ in last}, key=lambda f: (f[0] != "torch", f))
    lines = []
    for framework, feature in features:
        cells = [framework, feature]
        for torch in torches:
            r = last.get((framework, feature, torch))
            version = "" if r is None or framework == "torch" else f" ({framework} {_short(r['version'])})"
            cells.append("not run" if r is None else r["outcome"] + version)
        lines.append(cells)
    heads = ["framework", "feature", *(f"torch {t}" for t in torches)]
    return report.table(heads, "l" * len(heads), lines)


def filled(page: str, rows: Sequence[report.Row]) -> str:
    """The page with the table between its markers."""
    return MARKERS.sub(lambda match: f"{match[1]}{table(rows)}\n{match[2]}", page)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frameworks", description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, default=PAGE, help="what is rewritten (default: docs/frameworks.md)")
    args = parser.parse_args(argv)
    args.page.write_text(filled(args.page.read_text(), report.read(CSV)))
    print(args.page)


if __name__ == "__main__":
    main()
