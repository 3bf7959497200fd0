"""Checkpoint files: replaced atomically, and loaded with ``weights_only=True``."""

from __future__ import annotations

import dataclasses
import functools
import operator
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..options import OptionError, Techniques
from .config import TrainConfig
from .loop import FORMAT, KEYS, History
from .paths import ZIP, replacing


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes ``Trainer.state_dict()`` to ``path``, atomically."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        torch.save(state, file)


def _why_not(path: Path) -> str:
    """Says why torch.load refuses a file."""
    with path.open("rb") as file:
        begins_so = file.read(4) == ZIP
    if not begins_so:
        return "is no checkpoint: python -m memkern train --save writes them"
    if not zipfile.is_zipfile(path):
        return f"is cut off: {path.stat().st_size:,} bytes of a file that was not written to its end; use another one"
    return "is damaged, or holds other objects than a checkpoint of memkern train"


def _names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


_PARTS: tuple[tuple[tuple[str, ...], Sequence[str]], ...] = (
    ((), KEYS),
    (("config",), _names(TrainConfig)),
    (("config", "techniques"), _names(Techniques)),
    (("history",), _names(History)),
)


def _other_keys(state: Any) -> str | None:
    """Says which key is absent from a checkpoint, or unknown; None where all are as ``Trainer.state_dict`` has them."""
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        return f"its format is not {FORMAT}"
    for path, keys in _PARTS:
        found = functools.reduce(operator.getitem, path, state)
        name = ".".join(path) or "it"
        if not isinstance(found, dict):
            return f"{name} is no dict"
        if absent := [key for key in keys if key not in found]:
            return f"{name} has no {absent[0]!r}"
        if unknown := [key for key in found if key not in keys]:
            return f"{name} has an unknown {unknown[0]!r}"
    return None


def load(path: Path) -> dict[str, Any]:
    """Reads what ``save`` wrote, with ``weights_only=True`` and tensors on the CPU.

    Raises OptionError for any other file.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise OptionError("resume", f"{str(path)!r} cannot be read: {error}") from error
    except Exception as error:  # on a file of another format torch.load may raise anything
        raise OptionError("resume", f"{str(path)!r} {_why_not(path)}") from error
    if why := _other_keys(state):
        raise OptionError("resume", f"{str(path)!r} is no checkpoint of this version of memkern train: {why}")
    return state
