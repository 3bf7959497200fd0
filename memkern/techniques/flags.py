"""The flags of a command line, made from the fields of dataclasses. Imports no torch.

transformers.HfArgumentParser would do it too. It imports transformers, which a byte-level run does not need, and gives
every flag a default, where a resumed run and the planner must know which flags were given.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Callable, Iterable
from typing import Any

from .options import spelled


def flag(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"


def _choice(allowed: tuple[Any, ...]) -> Callable[[str], Any]:
    """argparse's type for an option with choices."""
    values = {spelled(value): value for value in allowed}

    def parse(text: str) -> Any:
        if text not in values:
            raise argparse.ArgumentTypeError(f"{text!r} given; allowed: {', '.join(values)}")
        return values[text]

    return parse


def _number(kind: type, optional: bool) -> Callable[[str], Any]:
    """argparse's type for a number, or "none" where that is allowed."""

    def parse(text: str) -> Any:
        return None if optional and text == "none" else kind(text)

    parse.__name__ = kind.__name__  # for argparse's "invalid int value"
    return parse


def _settings(field: dataclasses.Field, annotation: Any) -> dict[str, Any]:
    """argparse's settings for a field, by its choices or by its type."""
    allowed, metavar = field.metadata["allowed"], field.metadata["metavar"]
    [kind, *_] = (kind for kind in typing.get_args(annotation) or (annotation,) if kind is not type(None))
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if isinstance(allowed, tuple):
        return {"type": _choice(allowed), "metavar": "{" + ",".join(map(spelled, allowed)) + "}"}
    if typing.get_origin(annotation) is tuple:
        return {"nargs": "+", "action": "extend", "metavar": metavar}
    return {"type": _number(kind, field.default is None), "metavar": metavar or {int: "N", float: "X"}[kind]}


def add_flags(group: Any, options: type, fields: Iterable[dataclasses.Field], defaults: Any = None) -> None:
    """Adds a flag for each of the fields of a dataclass; without the flag the namespace has no such name.

    defaults: an instance whose values ``--help`` shows.
    """
    annotations = typing.get_type_hints(options)
    for field in fields:
        text = field.metadata["help"]
        settings = _settings(field, annotations[field.name])
        if defaults is not None and settings.get("action") is not argparse.BooleanOptionalAction:
            text += f" (default: {field.metadata['shown'] or spelled(getattr(defaults, field.name))})"
        group.add_argument(flag(field.name), default=argparse.SUPPRESS, help=text, **settings)
