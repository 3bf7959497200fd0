"""Which files ``--data`` names, and which of them are no text."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..options import OptionError
from .tables import check_installed

SNIFF = 8192
UTF_16 = "text in UTF-16 or UTF-32"
_BEGINNINGS = {
    b"\xff\xfe": UTF_16,
    b"\xfe\xff": UTF_16,
    b"\0\0\xfe\xff": UTF_16,
    b"\x1f\x8b": "compressed by gzip",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ\0": "compressed by xz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "a Parquet file without the ending .parquet",
    b"%PDF-": "a PDF",
}


class Files(NamedTuple):
    """The files to read, each once, and what was left out of folders, each with its reason."""

    paths: list[Path]
    left_out: list[str]


def standard_library_files() -> list[Path]:
    """The running Python's own .py files, sorted by path, without site-packages and without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return [
        path
        for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
        if left_out.isdisjoint(path.relative_to(root).parts[:-1])
    ]


def no_text(path: Path) -> str | None:
    """What a file is in place of text or a table; None where it may be one of the two.

    A file with a zero byte in its first 8 KiB is binary (git's rule). In UTF-16 without a byte order mark the zero
    bytes of Latin letters, digits and spaces are all at even or all at odd places.
    """
    if path.suffix.lower() == ".parquet":
        return None
    with path.open("rb") as file:
        head = file.read(SNIFF)
    for beginning, kind in _BEGINNINGS.items():
        if head.startswith(beginning):
            return kind
    even, odd = head[::2].count(0), head[1::2].count(0)
    if even + odd == 0:
        return None
    return UTF_16 if min(even, odd) == 0 and max(even, odd) > len(head) / 4 else "a binary file"


def _refused(path: str | Path, kind: str) -> OptionError:
    cure = " convert it to UTF-8;" if kind == UTF_16 else ""
    return OptionError(
        "data", f"{str(path)!r} given, {kind};{cure} allowed: text in UTF-8, JSONL, JSON, CSV, TSV, Parquet"
    )


def _folder(folder: Path, left_out: list[str]) -> Iterator[Path]:
    """Files of text and tables under ``folder``, sorted by path, without what is hidden.

    Adds to ``left_out`` links to folders, broken links and binary files. Raises OptionError for UTF-16: it is text, and
    would be missed.
    """
    for parent, folders, names in os.walk(folder, onerror=_raise):
        visible = sorted(name for name in folders if not name.startswith("."))
        folders[:] = [name for name in visible if not Path(parent, name).is_symlink()]
        left_out += [f"{str(Path(parent, name))!r} (a link to a folder)" for name in visible if name not in folders]
        for name in sorted(names):
            path = Path(parent, name)
            if name.startswith("."):
                continue
            kind = no_text(path) if path.is_file() else "no file, or a broken link"
            if kind == UTF_16:
                raise _refused(path, kind)
            if kind is None:
                yield path
            else:
                left_out.append(f"{str(path)!r} ({kind})")


def _raise(error: OSError) -> None:
    raise error


def find_files(data: Sequence[str]) -> Files:
    """The files that ``data`` names, in that order; without names Python's own.

    Raises OptionError for what cannot be read, and for a named file that is neither text nor a table.
    """
    if not data:
        return Files(standard_library_files(), [])
    files: dict[Path, None] = {}
    left_out: list[str] = []
    for name in data:
        path = Path(name)
        try:
            if path.is_dir():
                files.update((file.resolve(), None) for file in _folder(path, left_out))
            elif path.is_file():
                if (kind := no_text(path)) is not None:
                    raise _refused(name, kind)
                files[path.resolve()] = None
            else:
                raise OptionError("data", f"{name!r} given, which is neither a file nor a folder")
        except OSError as error:
            raise OptionError("data", f"{name!r} given, which cannot be read: {error}") from error
    check_installed(list(files))
    return Files(list(files), left_out)
