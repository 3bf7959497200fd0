"""A sign of life while a plan is made, which takes 10 to 40 s for the built-in models."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Iterator

TEXT = "The planner tries techniques on fake tensors; half a minute or more for a large model."
SECONDS = 3.0


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """On a terminal a spinner, where rich is installed; elsewhere a line on standard error after some seconds."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console

        with Console(stderr=True).status(TEXT):
            yield
        return
    timer = threading.Timer(SECONDS, lambda: print(TEXT, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
