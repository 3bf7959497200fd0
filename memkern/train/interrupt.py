"""Ctrl-C and SIGTERM between steps, checkpoints at them, and output that cannot be written."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loop import Trainer


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, after a checkpoint was written; the message says where. ``status``: the process's own."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.status = 128 + number


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


class Saver:
    """Called after each step: writes checkpoints. At Ctrl-C or SIGTERM in any process all write one and stop.

    A checkpoint that cannot be written, as on a full disk, does not end the run: the file of the step before stays, and
    the next one that is due is tried. ``failure`` says why the last one was not written.
    """

    def __init__(self, path: Path, interrupted: Callable[[], int]) -> None:
        self.path, self.interrupted = path, interrupted
        for left in path.parent.glob(glob.escape(f".{path.name}.") + "?" * 8 + ".tmp"):
            left.unlink(missing_ok=True)  # half written by a run that was killed
        self.failure: str | None = None
        self.written: int | None = None  # the step of the last checkpoint of this run

    def __call__(self, trainer: Trainer) -> None:
        import torch

        done, config, group = trainer.steps_done, trainer.config, trainer.group
        last = done == config.steps
        number = self.interrupted()
        stop = bool(group.sum(torch.tensor(float(number > 0), device=trainer.device)) > 0) and not last
        if stop or last or done % config.save_every == 0:
            state = trainer.state_dict()
            if group.first:
                self._write(state)
            group.barrier()
        if stop:
            text = f"Saved after step {done} of {config.steps}: go on with --resume {self.path}"
            if self.failure:
                text = f"Stopped after step {done} of {config.steps} and not saved: {self.failure}"
            raise Stopped(text, number or signal.SIGINT)
        if self.failure and not last and done % config.save_every == 0:
            text = "training goes on, and the next checkpoint is tried when it is due"
            say(f"\nNo checkpoint after step {done}: {self.failure}; {text}", "stderr")

    def _write(self, state: dict[str, Any]) -> None:
        from . import checkpoint

        try:
            checkpoint.save(self.path, state)
            self.failure, self.written = None, state["step"]
        except (OSError, RuntimeError) as error:  # torch.save wraps some OSErrors in RuntimeErrors
            cause = next((e for e in (error, error.__context__) if isinstance(e, OSError)), error)
            there = "is as it was before this run" if self.path.exists() else "is not there"
            if self.written is not None:
                there = f"has that of step {self.written}"
            self.failure = f"{str(cause).splitlines()[0]}. {self.path} {there}"


def say(text: str, stream: str = "stdout") -> None:
    """Prints a line. One that cannot be written (a closed pipe, a full disk) is lost, and so are the following ones: a
    run, and its checkpoints, are worth more than its log."""
    file = getattr(sys, stream)
    try:
        if file is not None:  # closed: >&-
            print(text, file=file, flush=True)
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):  # what is in its buffer would fail at exit, too
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
