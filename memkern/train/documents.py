"""Documents out of files of text and of tables, and which of them are for validation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..options import OptionError
from .data import VALIDATION_SHARE
from .files import find_files
from .tables import TEXT_FIELD, decoded, is_table, texts


class Documents(NamedTuple):
    """The documents for training and for validation, the number of files, and what folders have beside them."""

    train: list[str]
    validation: list[str]
    files: int
    left_out: list[str]


def read_table(path: Path, text_field: str, train: list[str], validation: list[str]) -> None:
    """Adds a table's rows: every tenth one is for validation, as files are often sorted."""
    for number, text in enumerate(texts(path, text_field), 1):
        if text:
            (train if number % VALIDATION_SHARE else validation).append(text)


def read_text(path: Path, train: list[str], validation: list[str]) -> None:
    """Adds a file of text: its last tenth is for validation."""
    text = decoded(path)
    cut = len(text) - len(text) // VALIDATION_SHARE
    for documents, part in ((train, text[:cut]), (validation, text[cut:])):
        if part:
            documents.append(part)


def read_documents(data: Sequence[str], *, text_field: str | None = None) -> Documents:
    """The documents of files and folders.

    A text file is a document, of which the last tenth is for validation. A row of a table (.jsonl, .json, .csv, .tsv,
    .parquet) is one, and every tenth row is for validation.

    Raises OptionError for what cannot be read, is no such file, has no such field or holds no text.
    """
    files = find_files(data)
    train: list[str] = []
    validation: list[str] = []
    for path in files.paths:
        if is_table(path):
            read_table(path, text_field or TEXT_FIELD, train, validation)
        else:
            read_text(path, train, validation)
    if not train and not validation:
        given = " ".join(data)
        raise OptionError("data", f"{given!r} given, which holds no text; allowed: files or folders of text")
    return Documents(train, validation, len(files.paths), files.left_out)
