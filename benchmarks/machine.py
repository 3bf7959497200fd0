"""Collects the provenance of measured figures: date, commit, hardware, versions of Python, torch and memkern."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def _output(*command: str) -> str:
    """The output of a command; empty where it is absent or fails."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def gpu_field(field: str) -> str:
    """The first GPU's value of one of nvidia-smi's fields, such as driver_version."""
    return _output("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader").partition("\n")[0] or "unknown"


def hardware(device: str) -> str:
    """The GPU and its driver, or the CPU with torch's threads and instruction set."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, driver {gpu_field('driver_version')}"
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    numbers = [line.split(":", 1)[1].strip() for line in lines if re.match(r"model\s*:", line)]
    if "Intel" in name and numbers and not re.search(r"\d", name):  # a virtual machine that hides which Xeon it is
        name += f" model {numbers[0]}"
    # torch's number of threads, not the machine's cores: the figures were measured with it
    return f"{name}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def slug(hardware: str) -> str:
    """The hardware in a results file's name; the driver's version is not part of it."""
    return re.sub(r"[^a-z0-9]+", "-", hardware.split(", driver")[0].lower()).strip("-")


def provenance(device: str) -> dict[str, str]:
    """What a row of results says about its origin, by column."""
    import memkern

    changed = _output("git", "status", "--porcelain", "--", ".", ":!benchmarks/results", ":!lab/results")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        # A copy of the tree without .git (on a GPU machine) gets its commit from the environment.
        "commit": _output("git", "rev-parse", "--short=12", "HEAD") or os.environ.get("MEMKERN_COMMIT", "unknown"),
        "dirty": "yes" if changed else "no",
        "hardware": hardware(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "memkern": memkern.__version__,
    }
