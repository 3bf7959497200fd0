"""Documents out of files of text and of tables, and which of them are for validation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..options import OptionError
from .data import VALIDATION_SHARE, find_files
from .tables import TEXT_FIELD, decoded, field, is_table, rows


def read_table(path: Path, text_field: str, train: list[str], validation: list[str]) -> None:
    """Adds a table's rows: every tenth one is for validation, as files are often sorted."""
    for number, row in enumerate(rows(path), 1):
        if text := field(row, "text_field", text_field, path, number):
            (train if number % VALIDATION_SHARE else validation).append(text)


def read_text(path: Path, train: list[str], validation: list[str]) -> None:
    """Adds a file of text: its last tenth is for validation."""
    text = decoded(path)
    cut = len(text) - len(text) // VALIDATION_SHARE
    for documents, part in ((train, text[:cut]), (validation, text[cut:])):
        if part:
            documents.append(part)


def read_documents(data: Sequence[str], *, text_field: str | None = None) -> tuple[list[str], list[str], int]:
    """The documents for training and for validation, and the number of files.

    A text file is a document, of which the last tenth is for validation. A row of a .jsonl, .csv, .tsv or .parquet file
    is one, and every tenth row is for validation.

    Raises OptionError for what cannot be read, is no such file, has no such field or holds no text.
    """
    files = find_files(data)
    train: list[str] = []
    validation: list[str] = []
    for path in files:
        if is_table(path):
            read_table(path, text_field or TEXT_FIELD, train, validation)
        else:
            read_text(path, train, validation)
    if not train:
        given = " ".join(data)
        raise OptionError("data", f"{given!r} given, which holds no text; allowed: files or folders of text")
    return train, validation, len(files)
