"""Ctrl-C between steps."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def deferred() -> Iterator[Callable[[], bool]]:
    """Inside the ``with`` block the first Ctrl-C is only noted, so that the step it meets is finished whole.

    Yields a function that says whether there was one. A second Ctrl-C raises KeyboardInterrupt at once. Outside the
    main thread, where Python sets no signal handlers, Ctrl-C stays as it is.
    """
    noted = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal noted
        noted = True
        signal.signal(signal.SIGINT, before)
        print("\nCtrl-C: saving after this step; once more ends at once", file=sys.stderr, flush=True)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, before)
