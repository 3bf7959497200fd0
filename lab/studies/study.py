"""Helpers of all studies: a command line with ``--out``, provenance, and rows that are written as they come."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks import machine, report
from lab import RESULTS

Value = TypeVar("Value")


def parser(name: str, doc: str | None, out: Path = RESULTS) -> argparse.ArgumentParser:
    """The command line of the study ``name``, described by the first line of its docstring."""
    summary = (doc or "").strip().splitlines()[0]
    command = argparse.ArgumentParser(prog=f"python -m lab.studies.{name}", description=summary)
    command.add_argument("--out", type=Path, default=out, help=f"folder (default: {out.parent.name}/results)")
    return command


def row(provenance: dict[str, Value], columns: Sequence[str], values: Sequence[Value]) -> dict[str, Value]:
    """A row of a results file: the provenance, then a value for each of the last columns."""
    return provenance | dict(zip(columns[-len(values) :], values, strict=True))


def provenance_with_transformers() -> dict[str, str]:
    """The provenance of rows about models of transformers, whose warnings are silenced."""
    import transformers

    transformers.logging.set_verbosity_error()
    return machine.provenance("cpu") | {"transformers": transformers.__version__}


def write(path: Path, rows: Iterable[dict[str, str]], columns: Sequence[str], shown: int) -> None:
    """Appends each row as it comes, and prints its last ``shown`` columns."""
    for new in rows:
        report.append(path, [new], columns)
        print(*(new[name] for name in columns[-shown:]), flush=True)
    print(path)
