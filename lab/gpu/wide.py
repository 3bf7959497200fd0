"""The tests that need a GPU (``pytest -m gpu``), in parallel: most of their time is the reference, on a CPU.

``python -m lab.gpu.wide [--plan] [FILE ...]``: of tests/; by default all but those of the part "device" (parts.py).

Files are dealt out as processes get free, those that only a GPU can decide first; every test's line is printed as it
comes, so that a run that is cut off has told what it knows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .runner import ROOT
from .supervised import MOST_STARTS, STICKY

DEVICE = "gpu/test_gpu.py"
FIRST = ("gpu/test_activation.py", "optim/", "fewbit/", "quant/")
MOST_PROCESSES = 8  # they share one GPU
OPTIONS: list[str] = []  # more for pytest, of a test
WORDS = ("PASSED", "FAILED", "ERROR", "SKIPPED")


def files(chosen: list[str]) -> list[Path]:
    tests = ROOT / "tests"
    if chosen:
        return [tests / name for name in chosen]

    def place(path: Path) -> int:
        name = str(path.relative_to(tests))
        return next((i for i, prefix in enumerate(FIRST) if name.startswith(prefix)), len(FIRST))

    found = (path for path in tests.rglob("test_*.py") if path != tests / DEVICE)
    return sorted(found, key=lambda path: (place(path), path))


def run(path: Path) -> Counter[str]:
    """The tests of a file; after one that left CUDA unusable (sticky.py) the next ones in a new process."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(path),
        "-m",
        "gpu",
        "-v",
        "-p",
        "no:cacheprovider",
        "-p",
        "lab.gpu.sticky",
        "--tb=short",
        *OPTIONS,
    ]
    found: Counter[str] = Counter()
    over: list[str] = []
    for _ in range(MOST_STARTS):
        before = len(over)
        code = once([*command, *(f"--deselect={name}" for name in over)], found, over)
        if code != STICKY or len(over) == before:
            break
    if code not in (0, 5) and not found["FAILED"]:  # 5: no test of the file needs a GPU
        found["ERROR"] += 1
    counts = ", ".join(f"{n} {word.lower()}" for word, n in sorted(found.items()))
    if found:
        print(f"{path.relative_to(ROOT)}: {counts}", flush=True)
    return found


def once(command: list[str], found: Counter[str], over: list[str]) -> int:
    """Runs pytest; counts outcomes, and adds the names of the tests that have one."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout or ():
        word = next((w for w in WORDS if f" {w}" in line and "::" in line), None)
        if word and "::" in line.split(f" {word}")[0]:
            found[word] += 1
            over.append(line.split(f" {word}")[0].strip())
        if word in ("FAILED", "ERROR") or line.startswith("E  ") or "died" in line:
            print(line.rstrip(), flush=True)
    return process.wait()


def main() -> int:
    chosen = files([name for name in sys.argv[1:] if not name.startswith("--")])
    if "--plan" in sys.argv:
        print(f"would run: pytest -m gpu, {len(chosen)} files, {MOST_PROCESSES} at a time")
        return 0
    with ThreadPoolExecutor(min(MOST_PROCESSES, os.cpu_count() or 1)) as pool:
        total = sum(pool.map(run, chosen), Counter())
    print(dict(total))
    return int(bool(total["FAILED"] + total["ERROR"]))


if __name__ == "__main__":
    sys.exit(main())
