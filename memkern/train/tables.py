"""Rows out of JSONL, CSV, TSV and Parquet files, and their fields."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..options import OptionError

TEXT_FIELD = "text"


def decoded(path: Path) -> str:
    """The file's UTF-8 text, without a byte order mark."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise OptionError("data", f"{str(path)!r} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise OptionError(
            "data", f"{str(path)!r} given, whose byte {error.start} is no UTF-8 text; allowed: text in UTF-8"
        ) from error


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(decoded(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise OptionError("data", f"{str(path)!r}, line {number}, is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise OptionError(
                "data", f"{str(path)!r}, line {number}, is no JSON object; allowed: an object a line"
            )
        yield row


def csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file whose first line has the names. The separator is a tab in .tsv files, else the comma."""
    csv.field_size_limit(2**31 - 1)  # the default of 128 kB is shorter than many texts
    reader = csv.DictReader(
        io.StringIO(decoded(path), newline=""), delimiter="\t" if path.suffix.lower() == ".tsv" else ","
    )
    try:
        yield from reader
    except csv.Error as error:
        raise OptionError("data", f"{str(path)!r}, line {reader.line_num}, is no CSV: {error}") from error


def field(row: dict[str, Any], option: str, name: str, path: Path, number: int) -> str:
    """A field of a row as text. Raises OptionError for the option that named it."""
    value = row.get(name)
    if value is None and name in row:
        raise OptionError(
            option,
            f"{name!r} given, which is null or missing in row {number} of {str(path)!r}; allowed: a text in every row",
        )
    if value is None:
        names = ", ".join(repr(key) for key in row if isinstance(key, str)) or "none"
        raise OptionError(
            option, f"{name!r} given, which row {number} of {str(path)!r} has not; allowed: {names}"
        )
    if isinstance(value, (dict, list)):
        raise OptionError(option, f"{name!r} given, which is no text in row {number} of {str(path)!r}")
    return value if isinstance(value, str) else json.dumps(value)


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """By pyarrow, a batch of rows at a time."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise OptionError(
            "data", f"{str(path)!r} needs pyarrow: pip install pyarrow, or convert the file to JSONL"
        ) from error
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise OptionError("data", f"{str(path)!r} is no Parquet file: {error}") from error


_READERS: dict[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
    ".jsonl": json_rows,
    ".csv": csv_rows,
    ".tsv": csv_rows,
    ".parquet": parquet_rows,
}
TABLES = tuple(_READERS)


def is_table(path: Path) -> bool:
    return path.suffix.lower() in TABLES


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a table. Raises OptionError where they cannot be read."""
    return _READERS[path.suffix.lower()](path)
