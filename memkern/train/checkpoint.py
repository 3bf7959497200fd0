"""Checkpoint files: replaced atomically, and loaded with ``weights_only=True``."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path
from typing import Any

import torch

from ..options import OptionError, Techniques
from .config import TrainConfig
from .loop import FORMAT
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


def _is_config(config: Any) -> bool:
    """Whether it has the fields of TrainConfig and Techniques."""
    return (
        isinstance(config, dict)
        and config.keys() == {field.name for field in dataclasses.fields(TrainConfig)}
        and isinstance(config["techniques"], dict)
        and config["techniques"].keys() == {field.name for field in dataclasses.fields(Techniques)}
    )


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
    if not isinstance(state, dict) or state.get("format") != FORMAT or not _is_config(state.get("config")):
        raise OptionError("resume", f"{str(path)!r} is no checkpoint of this version of memkern train")
    return state
