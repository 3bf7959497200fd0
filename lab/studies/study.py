"""What every study has: a command with ``--out``, and rows of its columns behind their provenance."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from lab import RESULTS

Value = TypeVar("Value")


def parser(name: str, doc: str | None, out: Path = RESULTS) -> argparse.ArgumentParser:
    """The command of the study ``name``, whose first line of documentation says what it does."""
    summary = (doc or "").strip().splitlines()[0]
    made = argparse.ArgumentParser(prog=f"python -m lab.studies.{name}", description=summary)
    made.add_argument("--out", type=Path, default=out, help=f"folder (default: {out.parent.name}/results)")
    return made


def row(provenance: dict[str, Value], columns: Sequence[str], values: Sequence[Value]) -> dict[str, Value]:
    """A row of a results file: the provenance, then a value for each of the last columns."""
    return provenance | dict(zip(columns[-len(values) :], values, strict=True))
