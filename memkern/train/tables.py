"""Rows out of JSONL, CSV, TSV and Parquet files, read by ``datasets``, and their fields."""

from __future__ import annotations

import glob
import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..options import OptionError

TEXT_FIELD = "text"
_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".csv": ("csv", {"keep_default_na": False}),  # "NA" and "null" are texts
    ".tsv": ("csv", {"keep_default_na": False, "sep": "\t"}),
    ".parquet": ("parquet", {}),
}
TABLES = tuple(_READERS)


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


def is_table(path: Path) -> bool:
    return path.suffix.lower() in TABLES


def check_installed(paths: Sequence[Path]) -> None:
    """Raises OptionError where one of the files is a table and ``datasets`` is absent."""
    table = next(filter(is_table, paths), None)
    if table is not None and importlib.util.find_spec("datasets") is None:
        raise OptionError(
            "data", f"{str(table)!r} needs datasets: pip install memkern[data], or convert the file to text"
        )


def _stream(path: Path, features: Any = None) -> Iterator[dict[str, Any]]:
    """The file's rows in order, with nothing written to the disk."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors become OptionErrors of one line
    builder, options = _READERS[path.suffix.lower()]
    files = glob.escape(str(path))
    return iter(
        datasets.load_dataset(
            builder, data_files=files, split="train", streaming=True, features=features, **options
        )
    )


def _strings(path: Path) -> Any:
    """The features of a CSV file, all of them strings: its types would change texts such as 1.50."""
    from datasets import Features, Value

    return Features({name: Value("string") for name in next(_stream(path), {})}) or None


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a table. Raises OptionError where they cannot be read."""
    try:
        with path.open("rb") as file:
            first = file.read(4096).lstrip(b"\xef\xbb\xbf\r\n\t ")[:1]
        if not first:
            return
        builder = _READERS[path.suffix.lower()][0]
        if builder == "json" and first != b"{":  # of a list datasets would make a column of its values
            raise ValueError("its first line is no object; allowed: an object a line")
        yield from _stream(path, _strings(path) if builder == "csv" else None)
    except Exception as error:  # pandas' and pyarrow's, some wrapped by datasets
        cause = str(error.__cause__ or error).strip().split("\n")[0]
        raise OptionError("data", f"{str(path)!r} is no {path.suffix[1:].upper()} file: {cause}") from error


def field(row: dict[str, Any], option: str, name: str, path: Path, number: int) -> str:
    """A field of a row as text. Raises OptionError for the option that named it."""
    value = row.get(name)
    if value is None and name in row:
        raise OptionError(
            option,
            f"{name!r} given, which is null or missing in row {number} of {str(path)!r}; allowed: a text in every row",
        )
    if value is None:
        names = ", ".join(map(repr, row)) or "none"
        raise OptionError(
            option, f"{name!r} given, which row {number} of {str(path)!r} has not; allowed: {names}"
        )
    if not isinstance(
        value, (str, int, float)
    ):  # a list, an object, or a date that pyarrow has made of a text
        raise OptionError(option, f"{name!r} given, which is no text in row {number} of {str(path)!r}")
    return value if isinstance(value, str) else json.dumps(value)
