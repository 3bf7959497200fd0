"""Documents out of files of text and of tables, and which of them are for validation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ..options import OptionError
from .data import VALIDATION_SHARE, find_files
from .tables import TABLES, TEXT_FIELD, decoded, field, is_table, rows


@dataclasses.dataclass
class Documents:
    """Texts, and their labels where a field of labels was asked for."""

    texts: list[str] = dataclasses.field(default_factory=list)
    labels: list[str] = dataclasses.field(default_factory=list)

    def add(self, text: str, label: str | None = None) -> None:
        self.texts.append(text)
        if label is not None:
            self.labels.append(label)


def read_table(
    path: Path, text_field: str, label_field: str | None, train: Documents, validation: Documents
) -> None:
    """Adds a table's rows: every tenth one is for validation, as files are often sorted by label."""
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

    A text file is a document, of which the last tenth is for validation. A row of a .jsonl, .csv, .tsv or .parquet file
    is one, and every tenth row is for validation. Where labels are asked for, only such tables are read.

    Raises OptionError for what cannot be read, is no such file, has no such field or holds no text.
    """
    files = find_files(data)
    train, validation = Documents(), Documents()
    for path in files:
        if is_table(path):
            read_table(path, text_field or TEXT_FIELD, label_field, train, validation)
        elif label_field is None:
            read_text(path, train, validation)
        else:
            raise OptionError(
                "label_field", f"given, but {str(path)!r} has no fields; allowed: {', '.join(TABLES)}"
            )
    if not train.texts:
        given = " ".join(data)
        raise OptionError("data", f"{given!r} given, which holds no text; allowed: files or folders of text")
    return train, validation, len(files)
