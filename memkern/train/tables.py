"""Texts out of the rows of JSONL, JSON, CSV, TSV and Parquet files, each error with file, row and reason."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..options import OptionError

TEXT_FIELD = "text"
Row = tuple[str, dict[str, Any]]
"""Where a row is, as "row 3 (line 4)", and its fields."""

_SPACE = re.compile(r"\s*")
_RECORDS = re.compile(rb"\s*\[\s*[{\]]")  # an array of objects, or an empty one
_LINES = re.compile(rb"\s*\{[^\n]*\}\s*\n\s*\{")  # an object a line


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
    """Whether rows are read from the file; of a .json file where it is an array of objects, or has one a line."""
    return _reader(path) is not None


def check_installed(paths: Sequence[Path]) -> None:
    """Raises OptionError where one of the files is Parquet and ``pyarrow`` is absent."""
    table = next((path for path in paths if path.suffix.lower() == ".parquet"), None)
    if table is not None and importlib.util.find_spec("pyarrow") is None:
        raise OptionError(
            "data", f"{str(table)!r} needs pyarrow, which the extra memkern[data] brings; or convert the file to JSONL"
        )


def texts(path: Path, name: str) -> Iterator[str]:
    """The field ``name`` of each row, in the rows' order. Raises OptionError, with the row, where there is no text."""
    read = _reader(path)
    assert read is not None
    try:
        for where, row in read(path, name):
            yield _text(row, name, f"{where} of {str(path)!r}")
    except OSError as error:
        raise OptionError("data", f"{str(path)!r} cannot be read: {error}") from error


def _absent(name: str, names: Iterable[str], where: str) -> OptionError:
    allowed = ", ".join(map(repr, names)) or "none"
    return OptionError("text_field", f"{name!r} given, which {where} has not; allowed: {allowed}")


def _text(row: dict[str, Any], name: str, where: str) -> str:
    if name not in row:
        raise _absent(name, row, where)
    value = row[name]
    if value is None:
        why = f"which is null or missing in {where}; allowed: a text in every row"
        raise OptionError("text_field", f"{name!r} given, {why}")
    if not isinstance(value, (str, int, float)):
        raise OptionError("text_field", f"{name!r} given, which is no text in {where}")
    text = value if isinstance(value, str) else json.dumps(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell one, UTF-8 cannot
        half = f"half a surrogate pair, \\u{ord(text[error.start]):x}, at character {error.start}"
        raise OptionError("data", f"{where}: {name!r} has {half}; allowed: whole characters") from error
    return text


@contextlib.contextmanager
def _named(path: Path, where: str) -> Iterator[None]:
    """Whatever a reader raises becomes an OptionError with the place."""
    try:
        yield
    except UnicodeDecodeError as error:
        why = f"byte {error.object[error.start]:#04x} is no UTF-8 text"
        raise OptionError("data", f"{where} of {str(path)!r}: {why}; allowed: text in UTF-8") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        why = f"no JSON: {error.msg} at {line}column {error.colno}"
        raise OptionError("data", f"{where} of {str(path)!r}: {why}") from error
    except RecursionError as error:
        raise OptionError("data", f"{where} of {str(path)!r}: brackets are nested too deeply") from error
    except (ValueError, csv.Error) as error:
        why = str(error).partition("; use sys.")[0]  # of a number with more digits than Python converts
        why = why.replace("unexpected end of data", 'a quote (") is opened and not closed')
        raise OptionError("data", f"{where} of {str(path)!r}: {why}") from error


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("no object; allowed: a JSON object in every row")
    return value


def _json_lines(path: Path, name: str) -> Iterator[Row]:
    with path.open("rb") as file:
        row = 0
        for line, content in enumerate(file, 1):
            if not content.strip(b"\xef\xbb\xbf\r\n\t "):
                continue
            row += 1
            where = f"row {row} (line {line})"
            with _named(path, where):
                found = _object(json.loads(content.rstrip(b"\r\n").decode("utf-8-sig" if line == 1 else "utf-8")))
            yield where, found


def _json_array(path: Path, name: str) -> Iterator[Row]:
    content = decoded(path)
    decode = json.JSONDecoder().raw_decode

    def skip(place: int) -> int:
        return _SPACE.match(content, place).end()  # type: ignore[union-attr]  # it matches nothing, too

    row, place = 0, skip(content.index("[") + 1)
    while content[place : place + 1] != "]":
        row += 1
        where = f"row {row}"
        with _named(path, where):
            value, place = decode(content, place)
            found = _object(value)
            place = skip(place)
            if content[place : place + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", content, place)
            if content[place] == ",":
                place = skip(place + 1)
        yield where, found


def _separated(path: Path, name: str) -> Iterator[Row]:
    """CSV's and TSV's rows; the first line has the names. All fields are texts as they stand in the file."""
    limit = csv.field_size_limit(2**31 - 1)  # the default of 128 KiB is shorter than many texts
    try:
        with path.open("rb") as file:
            lines = (line.decode("utf-8-sig" if i == 0 else "utf-8") for i, line in enumerate(file))
            reader = csv.reader(lines, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
            names: list[str] | None = None
            row = 0
            while True:
                where = f"row {row + 1} (line {reader.line_num + 1})" if names else "the first line"
                with _named(path, where):
                    fields = next(reader, None)
                    if fields is None:
                        return
                    if names is not None and len(fields) > len(names):
                        raise ValueError(f"{len(fields)} fields, where the first line has {len(names)} names")
                    if names is None and len({*fields}) < len(fields):
                        raise ValueError("a name is there twice")
                if not fields:
                    continue
                if names is None:
                    names = fields
                    continue
                row += 1
                yield where, dict(zip(names, [*fields, *[None] * (len(names) - len(fields))], strict=True))
    finally:
        csv.field_size_limit(limit)


def _parquet(path: Path, name: str) -> Iterator[Row]:
    """By pyarrow, a batch of rows of one column at a time."""
    from pyarrow import ArrowException, parquet

    row = 0
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if name not in names:
            raise _absent(name, names, f"{str(path)!r}")
        for batch in file.iter_batches(columns=[name]):
            for found in batch.to_pylist():
                row += 1
                yield f"row {row}", found
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise OptionError("data", f"{str(path)!r} is no Parquet file, after row {row}: {reason}") from error


_READERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".csv": _separated,
    ".tsv": _separated,
    ".parquet": _parquet,
}


def _reader(path: Path) -> Callable[[Path, str], Iterator[Row]] | None:
    ending = path.suffix.lower()
    if ending != ".json":
        return _READERS.get(ending)
    with path.open("rb") as file:
        lines = (line for line in file if line.strip())
        head = next(lines, b"").removeprefix(b"\xef\xbb\xbf") + next(lines, b"")
    return _json_array if _RECORDS.match(head) else _json_lines if _LINES.match(head) else None
