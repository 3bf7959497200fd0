"""Checkpoint files: replaced atomically, and loaded with ``weights_only=True``; and what else a run writes."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..techniques.options import OptionError
from .loop import FORMAT, KEYS

ZIP = b"PK\x03\x04"  # torch.save writes a zip archive


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes ``Trainer.state_dict()`` to ``path``, atomically."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        torch.save(state, file)


def load(path: Path) -> dict[str, Any]:
    """Reads what ``save`` wrote, with ``weights_only=True`` and tensors on the CPU.

    Raises OptionError for any other file.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise OptionError("resume", f"{str(path)!r} cannot be read: {error}") from error
    except Exception as error:  # on a file of another format torch.load may raise anything
        why = "is damaged or cut off" if is_checkpoint(path) else "is none: python -m memkern train --save writes them"
        raise OptionError("resume", f"{str(path)!r} given as a checkpoint, which {why}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT or {*state} != {*KEYS}:
        raise OptionError("resume", f"{str(path)!r} is no checkpoint of this version of memkern train")
    return state


def is_checkpoint(path: Path) -> bool:
    """Whether a file begins as one."""
    with path.open("rb") as file:
        return file.read(4) == ZIP


RESULTS = ("results.json", "losses.png")


def real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # in contrast to Path.resolve no error for a loop of links


def check_save(name: str, path: Path, out: Path | None) -> None:
    """Raises OptionError for what is no place for a checkpoint: one replaces its own kind, no text and no device."""
    target = real(path)
    new = not target.exists() or (target.is_file() and target.stat().st_size == 0)
    if not (new or (target.is_file() and is_checkpoint(target))) or not target.parent.is_dir():
        allowed = "a new file, or a checkpoint, in an existing folder"
        raise OptionError(name, f"{str(path)!r} given; allowed: {allowed}")
    if out is not None and target in (real(out), *(real(out / result) for result in RESULTS)):
        raise OptionError(name, f"{str(path)!r} given, where --out writes; allowed: a path of its own")
    check_folder(name, target.parent)


def check_folder(name: str, folder: Path, empty: bool = False) -> None:
    """Makes a folder for what a run writes at its end. Raises OptionError where nothing can be written in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:  # a full disk, a quota, a read-only file system
        raise OptionError(name, f"nothing can be written in {str(folder)!r}: {error.strerror}") from error
    if empty and any(folder.iterdir()):
        raise OptionError(name, f"{str(folder)!r} given, which is not empty; allowed: a new or an empty folder")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file of its own name beside ``path``, to be written inside the ``with`` block.

    Synced and renamed to ``path``, or to what a link there points to, at the end; removed on an error.
    """
    path = real(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":
        sync(path.parent)  # without this a power cut may undo the rename


def sync(path: Path) -> None:
    """Waits until a file or a folder is on the disk."""
    opened = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
