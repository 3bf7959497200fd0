"""Rewrites errors of ops for users of an optimizer: they name a parameter by its number, name and shape."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ..schemas import WEIGHT_STATES, StepArgs

OP_ERRORS = (RuntimeError, ValueError, TypeError)
"""An op raises these for arguments that it refuses, before it changes anything."""

_ENTRY = re.compile(r"\b(\w+)\[(\d+)\]")  # such as exp_avg[3]
# What errors call an entry of a list of StepArgs. Entries of other lists are "exp_avg of parameter" and the like.
_NAMES_OF_ENTRIES = {
    "params": "parameter",
    "grads": "the gradient of parameter",
    "steps": "step of parameter",
    "trust_ratios": "trust_ratio of parameter",
    "weight_states": "the rounding error of parameter",
}


def names_of(groups: Sequence[dict[str, Any]]) -> list[str | None]:
    """The name of each parameter; None in groups without names, or whose params alone were edited."""
    names: list[str | None] = []
    for group in groups:
        own, count = group.get("param_names", ()), len(group["params"])
        names += own if len(own) == count else [None] * count
    return names


def _number_and_name(p: Tensor, groups: Sequence[dict[str, Any]]) -> tuple[int, str | None]:
    """A parameter's number in ``state_dict()``, and its name, if it has one."""
    number = next(i for i, q in enumerate(q for g in groups for q in g["params"]) if q is p)
    return number, names_of(groups)[number]


def named(p: Tensor, groups: Sequence[dict[str, Any]]) -> str:
    """Text for a parameter: its number in ``state_dict()``, its name, if it has one, and its shape."""
    number, name = _number_and_name(p, groups)
    return f"parameter {number} ({'' if name is None else f'{name!r}, '}shape {tuple(p.shape)})"


@contextlib.contextmanager
def naming_parameter(p: Tensor, groups: Sequence[dict[str, Any]]) -> Iterator[None]:
    """A ``with`` block for checks of p, whose errors then begin with p's number and name."""
    try:
        yield
    except OP_ERRORS as error:
        number, name = _number_and_name(p, groups)
        raise type(error)(f"parameter {number}{'' if name is None else f' ({name!r})'}: {error}") from None


def with_parameter_names(error: Exception, args: StepArgs, groups: Sequence[dict[str, Any]]) -> Exception:
    """An op's error about ``exp_avg[3]`` as one about the exp_avg of a parameter, the one at index 3 in ``args``.

    The new error has the parameter's number in ``state_dict()``. An error that names no entry is returned as it is.
    """
    if type(error) not in OP_ERRORS:
        return error
    names = names_of(groups)
    numbers = {id(p): i for i, p in enumerate(p for g in groups for p in g["params"])}
    with_weight_state = [i for i, group in enumerate(args.group) if args.storage_of(group) in WEIGHT_STATES]

    def entry(match: re.Match[str]) -> str:
        kind, i = match[1], int(match[2])
        if kind == "weight_states":
            i = with_weight_state[i] if i < len(with_weight_state) else len(args.params)
        if i >= len(args.params) or (number := numbers.get(id(args.params[i]))) is None:
            return match[0]
        name = "" if names[number] is None else f"{names[number]!r}, "
        entry_of = _NAMES_OF_ENTRIES.get(kind, f"{kind} of parameter")
        return f"{entry_of} {number} ({name}shape {tuple(args.params[i].shape)})"

    text = _ENTRY.sub(entry, str(error))
    return type(error)(text) if text != str(error) else error
