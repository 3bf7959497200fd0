"""The error for a step that does not run on fake tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..options import OptionError, Techniques, spelled


class NotTraced(OptionError):
    """A step of the model with these techniques does not run on fake tensors."""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"


def not_traced(techniques: Techniques, error: Exception) -> NotTraced:
    """The error for a step that raises on fake tensors. It names what differs from plain training."""
    plain = Techniques(micro_batch=techniques.micro_batch)
    names = [field.name for field in dataclasses.fields(Techniques)]
    differ = [name for name in names if getattr(techniques, name) != getattr(plain, name)]
    if differ:
        given = ", ".join(f"{name}={spelled(getattr(techniques, name))}" for name in differ)
        return NotTraced("techniques", f"{given}: the model's step raises {_first_line(error)}")
    return NotTraced(
        "model",
        f"a plain training step raises on fake tensors ({_first_line(error)}); allowed: a model that can be built, and "
        "whose step does not depend on values: as a configuration, or as a module with a batch (inputs=) and, where it "
        "returns none, a loss (loss=)",
    )


def checked(found: Any) -> Any:
    """What was found; raises it where it is an error."""
    if isinstance(found, OptionError):
        raise found.with_traceback(None)  # which would grow with each time
    return found
