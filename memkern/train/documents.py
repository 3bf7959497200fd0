"""Documents out of text, JSONL and CSV files, and which of them are for validation."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .config import ArgumentError
from .data import VALIDATION_SHARE, find_files

TEXT_FIELD = "text"
TABLES = (".jsonl", ".csv", ".tsv")


@dataclasses.dataclass
class Documents:
    """Texts, and their labels where a field of labels was asked for."""

    texts: list[str] = dataclasses.field(default_factory=list)
    labels: list[str] = dataclasses.field(default_factory=list)

    def add(self, text: str, label: str | None = None) -> None:
        self.texts.append(text)
        if label is not None:
            self.labels.append(label)


def decoded(path: Path) -> str:
    """The file's UTF-8 text, without a byte order mark."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ArgumentError("data", f"{str(path)!r} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(
            "data", f"{str(path)!r} given, whose byte {error.start} is no UTF-8 text; allowed: text in UTF-8"
        ) from error


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(decoded(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ArgumentError("data", f"{str(path)!r}, line {number}, is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ArgumentError(
                "data", f"{str(path)!r}, line {number}, is no JSON object; allowed: an object a line"
            )
        yield row


def csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    """With a line of names. The separator is a tab in .tsv files, else the comma."""
    csv.field_size_limit(2**31 - 1)  # the default of 128 kB is shorter than many texts
    reader = csv.DictReader(
        io.StringIO(decoded(path), newline=""), delimiter="\t" if path.suffix.lower() == ".tsv" else ","
    )
    try:
        yield from reader
    except csv.Error as error:
        raise ArgumentError("data", f"{str(path)!r}, line {reader.line_num}, is no CSV: {error}") from error


def field(row: dict[str, Any], option: str, name: str, path: Path, number: int) -> str:
    """A field of a row as text. Raises ArgumentError for the option that named it."""
    value = row.get(name)
    if value is None:
        names = ", ".join(repr(key) for key in row if isinstance(key, str)) or "none"
        raise ArgumentError(
            option, f"{name!r} given, which row {number} of {str(path)!r} has not; allowed: {names}"
        )
    if isinstance(value, (dict, list)):
        raise ArgumentError(option, f"{name!r} given, which is no text in row {number} of {str(path)!r}")
    return value if isinstance(value, str) else json.dumps(value)


def read_table(
    path: Path, text_field: str, label_field: str | None, train: Documents, validation: Documents
) -> None:
    """Adds a table's rows: every tenth one is for validation, as files are often sorted by label."""
    rows: Callable[[Path], Iterator[dict[str, Any]]] = (
        json_rows if path.suffix.lower() == ".jsonl" else csv_rows
    )
    for number, row in enumerate(rows(path), 1):
        text = field(row, "text_field", text_field, path, number)
        label = None if label_field is None else field(row, "label_field", label_field, path, number)
        if text:
            (train if number % VALIDATION_SHARE else validation).add(text, label)


def read_text(path: Path, train: Documents, validation: Documents) -> None:
    """Adds a file of text: its last tenth is for validation."""
    text = decoded(path)
    cut = len(text) - len(text) // VALIDATION_SHARE
    for documents, part in ((train, text[:cut]), (validation, text[cut:])):
        if part:
            documents.add(part)


def read_documents(
    data: Sequence[str], *, text_field: str | None = None, label_field: str | None = None
) -> tuple[Documents, Documents, int]:
    """The documents for training and for validation, and the number of files.

    A text file is a document, of which the last tenth is for validation. A row of a .jsonl, .csv or .tsv file is one,
    and every tenth row is for validation. Where labels are asked for, only such tables are read.

    Raises ArgumentError for what cannot be read, is no such file, has no such field or holds no text.
    """
    files = find_files(data)
    train, validation = Documents(), Documents()
    for path in files:
        if path.suffix.lower() in TABLES:
            read_table(path, text_field or TEXT_FIELD, label_field, train, validation)
        elif label_field is None:
            read_text(path, train, validation)
        else:
            raise ArgumentError(
                "label_field", f"given, but {str(path)!r} has no fields; allowed: .jsonl, .csv, .tsv"
            )
    if not train.texts:
        given = " ".join(data)
        raise ArgumentError(
            "data", f"{given!r} given, which holds no text; allowed: files or folders of text"
        )
    return train, validation, len(files)
