"""Cases in a process that is started again where an error leaves CUDA unusable.

An illegal address in a kernel is sticky: from then on every CUDA call of the process fails, and all that comes later
would seem to be missing. So the process ends there, the case is named, and another process goes on with the next one.
A journal tells it where: a file with a line for each case that was begun or done, or that a process died in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

STICKY = 70  # exit code
MOST_STARTS = 20


def is_sticky() -> bool:
    """Whether CUDA cannot be used any more in this process."""
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


class Journal:
    """What earlier processes did, and what this one does. Without a file it remembers this process alone."""

    def __init__(self, path: str | None) -> None:
        self.path = Path(path) if path else None
        self.lines = self.path.read_text().splitlines() if self.path and self.path.exists() else []

    def _of(self, word: str) -> list[str]:
        return [line.removeprefix(f"{word} ") for line in self.lines if line.startswith(f"{word} ")]

    @property
    def died(self) -> list[str]:
        return self._of("died")

    @property
    def errors(self) -> list[str]:
        return self._of("error")

    @property
    def begun(self) -> list[str]:
        return self._of("begin")

    @property
    def over(self) -> set[str]:
        """Done, or not to be tried again."""
        return {*self._of("done"), *self.died}

    def note(self, word: str, name: str) -> None:
        """``word``: begin, done or died; "finished" at the end."""
        self.lines.append(f"{word} {name}")
        if self.path:
            with self.path.open("a") as file:
                file.write(self.lines[-1] + "\n")

    def die(self, name: str, why: object) -> NoReturn:
        """Ends the process, in which CUDA cannot be used any more. Python's own end would call CUDA.

        What is printed here may be hidden (harness.muted), so supervise() reports it.
        """
        self.note("error", (str(why).strip().splitlines() or [""])[0][:300])
        self.note("died", name)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(STICKY)


def supervise(command: list[str]) -> int:
    """Runs ``command --journal FILE``, again as long as it dies; returns its exit code, 1 where it died at all."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        for start in range(MOST_STARTS):
            before = Journal(str(path))
            code = subprocess.run([*command, "--journal", str(path)], check=False).returncode
            after = Journal(str(path))
            if any(line.startswith("finished") for line in after.lines):
                return code if start == 0 else 1
            if len(after.lines) == len(before.lines):
                print(json.dumps({"died": "before its first case", "exit code": code}), flush=True)
                return 1
            if code == STICKY:
                row: dict[str, object] = {"died": after.died[-1], "error": after.errors[-1]}
            else:  # killed, or an error that nothing caught
                after.note("died", after.begun[-1] if after.begun else "its first case")
                row = {"died": after.died[-1], "exit code": code}
            print(json.dumps(row), flush=True)
        print(json.dumps({"died": f"{MOST_STARTS} times; the rest is left out"}), flush=True)
    return 1
