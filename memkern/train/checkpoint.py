"""Writes and reads checkpoints (loaded with ``weights_only=True``), and replaces each file of a run atomically."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..techniques.options import OptionError, refused
from .loop import FORMAT

RESULTS = ("results.json", "losses.png")  # in the folder of --out


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes ``Trainer.state_dict()`` to ``path``, atomically."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        torch.save(state, file)


def load(path: Path) -> dict[str, Any]:
    """Reads what ``save`` wrote, with ``weights_only=True`` and tensors on the CPU.

    Raises OptionError for any other file, and for one that has changed since.
    """
    with refused("resume", f"{str(path)!r} given, which cannot be read as a checkpoint"):
        with zipfile.ZipFile(path) as archive:  # torch does not look at its checksums
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} is damaged")
        state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise OptionError("resume", f"{str(path)!r} is no checkpoint of this version of memkern train")
    return state


def check_save(name: str, path: Path, out: Path | None) -> None:
    """Raises OptionError unless ``path`` is a new file or an old checkpoint, in an existing folder that can be written
    to, and neither ``out`` nor one of the files that a run writes in it."""
    target = Path(os.path.realpath(path))  # in contrast to Path.resolve no error for a loop of links
    if (target.exists() and not _may_be_replaced(target)) or not target.parent.is_dir():
        allowed = "a new file, or a checkpoint, in an existing folder"
        raise OptionError(name, f"{str(path)!r} given; allowed: {allowed}")
    written_by_out = [] if out is None else [out, *(out / result for result in RESULTS)]
    if str(target) in map(os.path.realpath, written_by_out):
        raise OptionError(name, f"{str(path)!r} given, where --out writes; allowed: a path of its own")
    check_folder(name, target.parent)


def _may_be_replaced(path: Path) -> bool:
    """Whether it is an empty file, or a checkpoint, also one of another version."""
    with contextlib.suppress(Exception):  # of torch.load, for any other file
        if not path.is_file() or path.stat().st_size == 0:
            return path.is_file()
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return isinstance(state, dict) and "format" in state
    return False


def check_folder(name: str, folder: Path, empty: bool = False) -> None:
    """Makes a folder for what a run writes at its end. Raises OptionError where nothing can be written in it: a full
    disk, a quota, a read-only file system; with ``empty`` also where it is not empty."""
    with refused(name, f"nothing can be written in {str(folder)!r}"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
    if empty and any(folder.iterdir()):
        raise OptionError(name, f"{str(folder)!r} given, which is not empty; allowed: a new or an empty folder")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``, to be written inside the ``with`` block.

    Synced and renamed to ``path``, or to what a link there points to, at the end; removed on an error.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
