"""Plans in the user's cache folder: one JSON file for each configuration, arguments and versions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..options import Techniques
from .models import Configured, model_output_loss
from .outcome import Plan
from .prediction import Change, Prediction

PACKAGE = Path(__file__).parents[1]


def folder() -> Path:
    """``memkern/plans`` in ``XDG_CACHE_HOME``, by default in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memkern" / "plans"


@functools.cache
def _sources() -> str:
    """A hash of memkern's Python files: a version under development has many."""
    found = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def key(source: Any, arguments: Mapping[str, Any], counted_on: str) -> str | None:
    """What a plan depends on, as a hash; None for a module or a loss of the user, which have none."""
    if not isinstance(source, Configured) or source.loss is not model_output_loss:
        return None
    values = {name: x for name, x in arguments.items() if name != "source"}
    values["hardware"] = dataclasses.asdict(arguments["hardware"])
    versions = {name: version(name) for name in ("torch", "transformers")}
    versions |= {"python": platform.python_version(), "memkern": _sources()}
    parts = [
        source.name,
        source.config.to_dict(),
        source.seq_len,
        source.padded,
        source.tensor_parallel,
        values,
        counted_on,
        versions,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


def load(key: str) -> Plan | None:
    """The plan of that key; None where there is no file, or one that cannot be read."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        found = json.loads((folder() / f"{key}.json").read_text())
        if found["key"] == key:
            return _plan(found["plan"])
    return None


def store(key: str, plan: Plan) -> None:
    """Writes a plan. A folder that cannot be written is left as it is."""
    text = json.dumps({"key": key, "plan": dataclasses.asdict(plan)})
    with contextlib.suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder(), suffix=".tmp", delete=False) as file:
            file.write(text)
        Path(file.name).replace(folder() / f"{key}.json")


def _plan(values: dict[str, Any]) -> Plan:
    predictions: dict[str, Any] = {
        name: {row: _prediction(p) for row, p in values[name].items()} for name in ("alone", "ways")
    }
    predictions |= {name: _prediction(values[name]) for name in ("together", "recommended")}
    changes = tuple(Change(**change) for change in values["changes"])
    return Plan(**values | predictions | {"changes": changes})


def _prediction(values: dict[str, Any] | None) -> Prediction | None:
    if values is None:
        return None
    return Prediction(**values | {"techniques": Techniques(**values["techniques"])})
