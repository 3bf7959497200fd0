"""`make gpu` runs the tests and measurements that need a GPU, the most important first, as time may run out.

Each part is a command with a limit in seconds. Its output goes to out/gpu/PART.log (below $OUT, where that is set), its
lines of JSON to results.jsonl there, for ``python -m lab.gpu.record``. A part that fails does not stop the others; the
exit status is 1 then. ``--part`` runs one part alone, ``--plan`` prints what would run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import ROOT

from .gpu import find_gpu, output, tool

RESULTS = (":!benchmarks/results", ":!lab/results")  # files that measuring itself changes


def module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"lab.gpu.{name}", *arguments]


# Four processes, as most of a test's time is the reference's on the CPU.
_SHARED = ["--numprocesses", "4", "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []
PARTS: dict[str, tuple[int, list[str]]] = {  # limit in seconds, command
    "build": (400, [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]),
    "tests": (600, [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *_SHARED, "tests/gpu", "tests"]),
    "sanitizers": (200, module("sanitize")),
    "headline": (150, module("headline", "cuda")),
    "triton headline": (150, module("headline", "triton")),
    "models": (100, module("models")),
    "compiled": (500, module("compiled", "--seconds", "450")),
    "recipe": (200, module("recipe", "gpt2-xl")),
    "stream": (300, module("recipe", "llama-8b")),
    "host": (120, module("host")),
}


def environment() -> dict[str, Any]:
    """The first row of the results: what they were measured with."""
    import torch

    gpu = find_gpu()
    commit = os.environ.get("MEMKERN_COMMIT")  # set for a copy of a commit's files that has no .git of its own
    return {
        "gpu": gpu and gpu.name,
        "capability": gpu and gpu.capability,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "nvcc": (output("nvcc", "--version") or "").rpartition("\n")[2] or None,
        "commit": commit or output("git", "rev-parse", "--short=12", "HEAD"),
        "dirty": not commit and bool(output("git", "status", "--porcelain", "--", ".", *RESULTS)),
    }


def run(name: str, seconds: float, command: list[str], folder: Path) -> dict[str, Any]:
    """Runs a part, adds its rows to results.jsonl, and returns its result and seconds."""
    nvcc = tool("nvcc")
    folders = [str(Path(nvcc).parent)] if nvcc else []
    env = os.environ | {"PYTHONUNBUFFERED": "1", "PATH": os.pathsep.join([*folders, os.environ["PATH"]])}
    start, result = time.monotonic(), "passed"
    with (folder / f"{name}.log").open("w") as log:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=seconds, check=False
            ).returncode
            result = "passed" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            result = "timed out"
    for line in (folder / f"{name}.log").read_text(errors="replace").splitlines():
        if line.startswith("{"):
            add(folder, name, json.loads(line))
    return {"result": result, "seconds": round(time.monotonic() - start, 1)}


def add(folder: Path, part: str, row: dict[str, Any]) -> None:
    """Appends a row to results.jsonl."""
    with (folder / "results.jsonl").open("a") as lines:
        lines.write(json.dumps({"part": part, **row}) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="one part; may be given again")
    parser.add_argument("--plan", action="store_true", help="prints what would run")
    args = parser.parse_args(argv)
    about = environment()
    print(", ".join(f"{name} {value}" for name, value in about.items() if value), flush=True)
    chosen = {name: PARTS[name] for name in args.part or PARTS}
    if args.plan:
        for name, (seconds, command) in chosen.items():
            print(f"{name}, {seconds} s: {' '.join(command)}")
        return 0
    if about["gpu"] is None:
        print("make gpu: no GPU was found by nvidia-smi, by torch or by CUDA's driver; nothing was proved")
        return 1
    folder = Path(os.environ.get("OUT") or ROOT / "out") / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    add(folder, "environment", about)
    failed = False
    for name, (seconds, command) in chosen.items():
        outcome = run(name, seconds, command, folder)
        add(folder, name, outcome)
        print(f"{name:16} {outcome['result']:10} {outcome['seconds']:6.1f} s", flush=True)
        failed |= outcome["result"] != "passed"
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
