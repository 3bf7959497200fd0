"""Checkpoint files, and all else that a run writes: checked before it begins, and replaced atomically."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..flags import flag
from ..options import OptionError
from .config import TrainConfig
from .loop import FORMAT, KEYS

ZIP = b"PK\x03\x04"  # torch.save writes a zip archive
RESULTS = ("results.json", "losses.png")
ALLOWED = {
    "save": "a new file, or a checkpoint, in an existing folder that can be written",
    "resume": "a checkpoint in a folder that can be written, or a --save elsewhere",
    "out": "a folder that exists or can be made",
    "export": "a new or an empty folder",
}


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
        why = "is damaged, or holds other objects than a checkpoint of memkern train"
        if not is_checkpoint(path):
            why = "is no checkpoint: python -m memkern train --save writes them"
        elif not zipfile.is_zipfile(path):
            why = f"is cut off: {path.stat().st_size:,} bytes of a file that was not written to its end"
        raise OptionError("resume", f"{str(path)!r} {why}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT or {*state} != {*KEYS}:
        raise OptionError("resume", f"{str(path)!r} is no checkpoint of this version of memkern train")
    return state


def is_checkpoint(path: Path) -> bool:
    """Whether a file begins as one."""
    with path.open("rb") as file:
        return file.read(4) == ZIP


# What is written


def real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # in contrast to Path.resolve no error for a loop of links


def check_paths(args: argparse.Namespace, config: TrainConfig) -> None:
    """Raises OptionError unless what is written can be, and neither is, holds nor lies in what is read or written too.

    Leaves no file behind. A checkpoint, and results, are written in place of their own kind only: no device, no text.
    """
    written = [("out", args.out / name) for name in RESULTS] if args.out else []
    if args.export:
        written.append(("export", args.export))
    if to := args.save or args.resume:
        written.append(("save" if args.save else "resume", to))
    read = [("data", Path(name)) for name in config.data]
    if not config.is_preset and os.path.isdir(config.model):
        read.append(("model", Path(config.model)))
    if args.resume and real(args.resume) != real(to):
        read.append(("resume", args.resume))
    for i, (name, path) in enumerate(written):
        check_written(name, path)
        for other, taken in (*written[i + 1 :], *read):
            ours, theirs = real(path), real(taken)
            if ours == theirs or ours in theirs.parents or theirs in ours.parents:
                text = f"{str(path)!r} given, which is, holds or lies in {str(taken)!r} of {flag(other)}"
                raise OptionError(name, f"{text}; allowed: a path of its own")


def check_written(name: str, path: Path) -> None:
    """Raises OptionError for a path that could not be written at the end of the run."""
    target = real(path)
    # os.path, as pathlib's tests raise in a folder without search permission.
    if os.path.exists(target) and not (os.path.isdir if name == "export" else os.path.isfile)(target):
        kind = "a folder" if os.path.isdir(target) else "a file" if os.path.isfile(target) else "a device or a pipe"
        raise OptionError(name, f"{str(path)!r} given, which is {kind}; allowed: {ALLOWED[name]}")
    folder = target if name == "export" else target.parent
    if name in ("out", "export"):
        folder = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not os.path.isdir(folder) or not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        shown = path.parent if name == "out" else path
        raise OptionError(name, f"{str(shown)!r} given; allowed: {ALLOWED[name]}")
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
        if name == "export" and os.path.isdir(target) and os.listdir(target):
            raise OptionError(name, f"{str(path)!r} given, which is not empty; allowed: {ALLOWED[name]}")
        if name == "save" and os.path.isfile(target) and target.stat().st_size and not is_checkpoint(target):
            raise OptionError(name, f"{str(path)!r} given, which is no checkpoint; allowed: {ALLOWED[name]}")
    except OSError as error:  # a full disk, a quota, a read-only file system
        raise OptionError(name, f"nothing can be written in {str(folder)!r}: {error.strerror}") from error


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
