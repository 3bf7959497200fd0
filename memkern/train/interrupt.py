"""Defers Ctrl-C and SIGTERM to the end of a step, writes checkpoints, and prints where output may be closed."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from . import checkpoint
from .distributed import gathered, rank
from .loop import Trainer


@contextlib.contextmanager
def deferred() -> Iterator[list[int]]:
    """Inside the ``with`` block Ctrl-C and SIGTERM are only noted, so that the step they meet is finished whole.

    Yields the list of the signals' numbers. A second Ctrl-C does at once what it did before the block, but not under
    torchrun, which sends its processes what the terminal has sent them already. An ignored signal (nohup) stays so.
    """
    noted: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        if number == signal.SIGINT and "RANK" not in os.environ:
            signal.signal(number, handlers[signal.SIGINT])

    handlers = {number: signal.getsignal(number) or signal.SIG_DFL for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in handlers.items():
        signal.signal(number, handler if handler is signal.SIG_IGN else handle)
    try:
        yield noted
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Saver:
    """Called after each step: writes checkpoints. At Ctrl-C or SIGTERM in any process all write one and exit.

    A checkpoint that cannot be written, as on a full disk, does not end the run: the file of the step before stays, and
    the next one that is due is tried. ``failure`` says why the last one was not written.
    """

    def __init__(self, path: Path, signals: Sequence[int]) -> None:
        self.path, self.signals = path, signals
        target = Path(os.path.realpath(path))
        for leftover in target.parent.glob(glob.escape(f".{target.name}.") + "?" * 8 + ".tmp"):
            leftover.unlink(missing_ok=True)  # half written by a run that was killed
        self.failure: str | None = None

    def __call__(self, trainer: Trainer) -> None:
        steps_done, steps = trainer.steps_done, trainer.config.steps
        number = max(gathered(self.signals[0] if self.signals else 0)) if steps_done < steps else 0
        if not number and steps_done < steps and steps_done % trainer.config.save_every:
            return
        self._write(trainer)
        if rank() == 0 and (number or self.failure):
            message = f"not saved: {self.failure}" if self.failure else f"saved: go on with --resume {self.path}"
            say(f"Step {steps_done} of {steps} {message}", "stderr")
        if number:
            sys.exit(128 + number)

    def _write(self, trainer: Trainer) -> None:
        state, failure = trainer.state_dict(), None
        try:
            if rank() == 0:
                checkpoint.save(self.path, state)
        except (OSError, RuntimeError) as error:  # torch.save wraps some OSErrors in RuntimeErrors
            cause = next((e for e in (error, error.__context__) if isinstance(e, OSError)), error)
            failure = f"{str(cause).splitlines()[0]}. {self.path} is as it was"
        [self.failure, *_] = gathered(failure)  # all wait until it is written


def say(text: str, stream: str = "stdout") -> None:
    """Prints a line. One that cannot be written (a closed pipe, a full disk) is lost, and so are the following ones."""
    file = getattr(sys, stream)
    try:
        if file is not None:  # None where the shell has closed it (>&-)
            print(text, file=file, flush=True)
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):  # what is in its buffer would fail at exit, too
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
