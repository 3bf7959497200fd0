"""The tests that need a GPU (``pytest -m gpu``), in parallel: most of their time is the reference, on a CPU.

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

FIRST = ("gpu/test_gpu.py", "gpu/test_activation.py", "optim/", "fewbit/", "quant/")
MOST_PROCESSES = 8  # they share one GPU
WORDS = ("PASSED", "FAILED", "ERROR", "SKIPPED")


def files() -> list[Path]:
    def place(path: Path) -> int:
        name = str(path.relative_to(ROOT / "tests"))
        return next((i for i, prefix in enumerate(FIRST) if name.startswith(prefix)), len(FIRST))

    return sorted((ROOT / "tests").rglob("test_*.py"), key=lambda path: (place(path), path))


def run(path: Path) -> Counter[str]:
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
        "--tb=short",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found: Counter[str] = Counter()
    for line in process.stdout or ():
        word = next((w for w in WORDS if f" {w}" in line and "::" in line), None)
        if word:
            found[word] += 1
        if word in ("FAILED", "ERROR") or line.startswith("E  "):
            print(line.rstrip(), flush=True)
    code = process.wait()
    if code not in (0, 5) and not found["FAILED"]:  # 5: no test of the file needs a GPU
        found["ERROR"] += 1
    counts = ", ".join(f"{n} {word.lower()}" for word, n in sorted(found.items()))
    if found:
        print(f"{path.relative_to(ROOT)}: {counts}", flush=True)
    return found


def main() -> int:
    chosen = files()
    if "--plan" in sys.argv:
        print(f"would run: pytest -m gpu, {len(chosen)} files, {MOST_PROCESSES} at a time")
        return 0
    with ThreadPoolExecutor(min(MOST_PROCESSES, os.cpu_count() or 1)) as pool:
        total = sum(pool.map(run, chosen), Counter())
    print(dict(total))
    return int(bool(total["FAILED"] + total["ERROR"]))


if __name__ == "__main__":
    sys.exit(main())
