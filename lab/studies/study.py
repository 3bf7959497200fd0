"""Shared by all studies: a command with ``--out``, provenance, and rows that are written as they come."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks import machine, report
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


def provenance_with_transformers() -> dict[str, str]:
    """The provenance of rows about models of transformers, whose warnings are silenced."""
    import transformers

    transformers.logging.set_verbosity_error()
    return machine.provenance("cpu") | {"transformers": transformers.__version__}


def write(path: Path, rows: Iterable[dict[str, str]], columns: Sequence[str], shown: int) -> None:
    """Appends each row when it is there, and prints the last ``shown`` columns of it."""
    for each in rows:
        report.append(path, [each], columns)
        print(*(each[name] for name in columns[-shown:]), flush=True)
    print(path)
