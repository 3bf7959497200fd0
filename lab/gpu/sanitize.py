"""Runs small.py under each tool of compute-sanitizer: ``python -m lab.gpu.sanitize``."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from benchmarks import ROOT

from .gpu import tool

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Has torch allocate each tensor by itself. In cached segments the tools would not see an access past a tensor's end,
# and bytes that an earlier tensor left would count as initialized.
NO_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def command(name: str) -> list[str]:
    program = [sys.executable, "-m", "lab.gpu.small"]
    return [str(tool("compute-sanitizer")), "--tool", name, "--error-exitcode", "9", *program]


def run(name: str) -> int:
    """Runs a tool and prints its lines as they come, so that they are there when the time is up."""
    process = subprocess.Popen(
        command(name),
        cwd=ROOT,
        env=os.environ | NO_CACHE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in process.stdout or ():
        print(f"{name}: {line.rstrip()}", flush=True)
    code = process.wait()
    print(f"{name}: {'nothing found' if code == 0 else f'exit code {code}'}", flush=True)
    return code


def main() -> int:
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        return int(any(pool.map(run, TOOLS)))


if __name__ == "__main__":
    sys.exit(main())
