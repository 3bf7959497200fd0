"""Ctrl-C and SIGTERM between steps, and output that cannot be written."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def deferred() -> Iterator[Callable[[], int]]:
    """Inside the ``with`` block Ctrl-C and SIGTERM are only noted, so that the step they meet is finished whole.

    Yields a function that gives the number of the first signal, 0 before one. A second Ctrl-C does at once what it did
    before the block, but not under torchrun, which sends its processes what the terminal has sent them already. A
    signal that was ignored (nohup) stays so. Outside the main thread, where Python sets no signal handlers, all stay
    as they are.
    """
    noted = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal noted
        noted = noted or number
        if number == signal.SIGINT and "RANK" not in os.environ:
            signal.signal(number, before[number])

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, handle)
    try:
        yield lambda: noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Unfailing:
    """A text stream that drops what it cannot write."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream or open(os.devnull, "w")  # noqa: SIM115

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def finish(self) -> None:
        """Lets go of what is still in the buffer: it would fail at exit, too, and change the exit status."""
        with contextlib.suppress(OSError, ValueError):
            try:
                self._stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def unfailing_output() -> Iterator[None]:
    """Inside, what is printed raises nothing: it is lost where its reader has ended (tee), its disk is full or standard
    output is closed. A run, and its checkpoints, are worth more than its log."""
    out: Any = _Unfailing(sys.stdout)
    err: Any = _Unfailing(sys.stderr)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield
    finally:
        out.finish()
        err.finish()
