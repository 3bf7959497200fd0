"""Runs one part of `make gpu`: its lines are written as they come, and it ends when its time is up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_LOG_BYTES = 1 << 20  # of each file in the archive: its end


@dataclass
class Part:
    """A command of `make gpu`."""

    name: str
    what: str  # it does, in one line
    command: list[str]
    seconds: float  # the most that it may take
    environment: dict[str, str] = field(default_factory=dict)
    missing: str | None = None  # why it cannot run here
    plan: list[str] | None = None  # where there is no GPU: a command that says what it would do
    by_name: bool = False  # runs only where it is named
    beside: bool = False  # runs with the parts next to it that do so too: it measures no time
    expected: float = 0.0  # seconds


@dataclass
class Outcome:
    part: str
    result: str  # passed, failed, timed out, skipped, planned
    seconds: float = 0.0
    reason: str = ""


class Results:
    """The folder that a run fills: a log for each part, and results.jsonl, an object a line, flushed line by line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.lines = (folder / "results.jsonl").open("a", buffering=1)
        self.lock = threading.Lock()  # parts run side by side

    def add(self, part: str, row: dict[str, object]) -> None:
        with self.lock:
            self.lines.write(json.dumps({"part": part, **row}) + "\n")
            self.lines.flush()

    def archive(self, path: Path) -> None:
        """Everything in one file, which takes the place of the one before in one move."""
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".new")
        with self.lock:
            with tarfile.open(new, "w:gz") as tar:
                for file in sorted(self.folder.rglob("*")):
                    if file.is_file():
                        tar.addfile(*_member(file, self.folder))
            new.replace(path)


def _member(file: Path, folder: Path) -> tuple[tarfile.TarInfo, object]:
    import io

    data = file.read_bytes()[-MOST_LOG_BYTES:]
    member = tarfile.TarInfo(f"gpu-results/{file.relative_to(folder)}")
    member.size, member.mtime = len(data), int(file.stat().st_mtime)
    return member, io.BytesIO(data)


_running: set[subprocess.Popen[str]] = set()


def _kill(process: subprocess.Popen[str]) -> None:
    """Ends a process and those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def end_all() -> None:
    """Ends the parts that are running."""
    for process in [*_running]:
        _kill(process)


def run(part: Part, seconds: float, results: Results, say: Callable[[str], object], gpu: bool) -> Outcome:
    """Runs the part for `seconds` at most; lines that are JSON objects go to results.jsonl too."""
    command, planned = part.command, not gpu and part.plan is not None
    if part.missing:
        return Outcome(part.name, "skipped", 0.0, part.missing)
    if planned:
        command = part.plan or []
    elif seconds < 5:
        return Outcome(part.name, "skipped", 0.0, "the time is up")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **part.environment}
    start = time.monotonic()
    expired = threading.Event()
    with (results.folder / f"{part.name.replace(' ', '-')}.log").open("w", buffering=1) as log:
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # its own children end with it
            )
        except OSError as error:
            return Outcome(part.name, "failed", time.monotonic() - start, str(error))

        _running.add(process)

        def end() -> None:
            expired.set()
            _kill(process)

        timer = threading.Timer(max(seconds, 1), end)
        timer.start()
        try:
            for line in process.stdout or ():
                log.write(line)
                if line.startswith("{"):
                    with contextlib.suppress(ValueError):
                        results.add(part.name, json.loads(line))
                say(f"    {line.rstrip()}")
            code = process.wait()
        finally:
            timer.cancel()
            _running.discard(process)
            _kill(process)
    spent = time.monotonic() - start
    if expired.is_set():
        return Outcome(part.name, "timed out", spent, f"after {seconds:.0f} s")
    if code:
        return Outcome(part.name, "failed", spent, f"exit code {code}")
    return Outcome(part.name, "planned" if planned else "passed", spent)


def row_of(outcome: Outcome) -> dict[str, object]:
    row = asdict(outcome)
    del row["part"]
    return row
