"""Ctrl-C and SIGTERM between steps."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


@contextlib.contextmanager
def deferred() -> Iterator[Callable[[], int]]:
    """Inside the ``with`` block the first Ctrl-C or SIGTERM is only noted, so that the step it meets is finished whole.

    Yields a function that gives the number of the signal, 0 before one. A second one does at once what it did before
    the block: Ctrl-C raises KeyboardInterrupt, SIGTERM ends the process. Outside the main thread, where Python sets no
    signal handlers, both stay as they are.
    """
    noted = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal noted
        noted = number
        restore()
        name = NAMES[signal.Signals(number)]
        print(f"\n{name}: saving after this step; once more ends at once", file=sys.stderr, flush=True)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    before = {number: signal.signal(number, handle) for number in NAMES}
    try:
        yield lambda: noted
    finally:
        restore()
