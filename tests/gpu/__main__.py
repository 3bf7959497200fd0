"""`make gpu`: everything that a GPU can prove and measure, in one call, on a machine without a network.

Builds in place for the GPU that is there, runs the GPU tests, compute-sanitizer over a small case and the benchmarks.
What fails does not stop the rest; what is left out is named. Results: benchmarks/results/, and a log of each part in
--out (default out/gpu). Ends with 1 where something failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PARTS = ("build", "tests", "memcheck", "racecheck", "benchmarks")
SMALL = [sys.executable, str(Path(__file__).with_name("small.py"))]
# Largest first: should the time run out, what is missing is of least interest.
SIZES = {"activation": 2**26, "linear": 2**26}  # elements; others take the benchmark's default
TOPICS = ("optim", "quantize", "lamb", "activation")


@dataclass
class Part:
    """A command, the most seconds that it may take, and why it cannot run here."""

    name: str
    command: list[str]
    seconds: int
    environment: dict[str, str]
    missing: str | None = None


@dataclass
class Outcome:
    name: str
    result: str  # passed, failed, timed out, skipped
    seconds: float
    reason: str = ""


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def capability() -> str | None:
    """Of the first GPU, such as "9.0"."""
    found = output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    return found.splitlines()[0].strip() if found else None


def sanitizer() -> str | None:
    found = shutil.which("compute-sanitizer")
    if found:
        return found
    places = [Path("/usr/local/cuda/bin"), *sorted(Path("/usr/local").glob("cuda-*/bin"), reverse=True)]
    return next((str(p / "compute-sanitizer") for p in places if (p / "compute-sanitizer").exists()), None)


def workers() -> list[str]:
    """Tests side by side where pytest-xdist is installed: the reference on the CPU takes most of their time."""
    return ["-n", str(min(8, os.cpu_count() or 1)), "--dist", "loadgroup"] if has("xdist") else []


def topics() -> list[str]:
    found = {path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py")}
    return [*(t for t in TOPICS if t in found), *sorted(found - {*TOPICS})]


def parts(arch: str | None) -> Iterator[Part]:
    """In the order of what is wanted most, should the time run out."""
    no_gpu = None if arch else "nvidia-smi names no GPU"
    nvcc = shutil.which(os.environ.get("NVCC", "nvcc"))
    build = {"MEMKERN_BUILD": "cuda" if nvcc else "cpu", "TORCH_CUDA_ARCH_LIST": arch or ""}
    python = sys.executable
    yield Part("build", [python, "setup.py", "-q", "build_ext", "--inplace"], 180, build, no_gpu)
    pytest = [python, "-m", "pytest", "tests", "-m", "gpu", "-q", "-rfE", "--maxfail=50", *workers()]
    yield Part("tests", pytest, 240, {}, no_gpu)
    lacking = [module for module in ("numpy", "rich", "matplotlib") if not has(module)]
    reason = no_gpu or (f"{', '.join(lacking)} not installed" if lacking else None)
    measure = []
    for topic in topics():
        size = ["--size", str(SIZES[topic])] if topic in SIZES else []
        command = [python, "-m", "benchmarks", "--device", "cuda", "--only", topic, *size]
        measure.append(Part(f"benchmarks {topic}", command, 100, {}, reason))
    yield measure[0]
    check = sanitizer()
    why = no_gpu or (None if check else "compute-sanitizer is not installed")
    for name in ("memcheck", "racecheck"):
        command = [str(check), "--tool", name, "--error-exitcode", "9", *SMALL]
        yield Part(name, command, 60, {"MEMKERN_BACKEND": "cuda"}, why)
    yield from measure[1:]


def run(part: Part, seconds: float, log: Path) -> Outcome:
    if part.missing:
        return Outcome(part.name, "skipped", 0.0, part.missing)
    if seconds < 10:
        return Outcome(part.name, "skipped", 0.0, "the time is up")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **part.environment}
    start = time.monotonic()
    with log.open("w") as file:
        try:
            code = subprocess.run(
                part.command,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=seconds,
            ).returncode
        except subprocess.TimeoutExpired:
            return Outcome(part.name, "timed out", time.monotonic() - start, f"after {seconds:.0f} s")
        except OSError as error:
            return Outcome(part.name, "failed", time.monotonic() - start, str(error))
    result = "passed" if code == 0 else "failed"
    return Outcome(part.name, result, time.monotonic() - start, "" if code == 0 else f"exit code {code}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "gpu", help="for logs and copies of results"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything (default: 8)")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; may be given again")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    arch = capability()
    smi = output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    print(f"GPU: {smi or 'none'}; compute capability {arch or 'unknown'}", flush=True)

    outcomes = []
    for part in parts(arch):
        if args.only and part.name.split()[0] not in args.only:
            continue
        log = args.out / (part.name.replace(" ", "_") + ".log")
        outcome = run(part, min(part.seconds, end - time.monotonic()), log)
        outcomes.append(outcome)
        print(f"{outcome.name:24}{outcome.result:10}{outcome.seconds:7.1f} s  {outcome.reason}", flush=True)
        if log.exists() and (outcome.result != "passed" or part.name in ("tests",)):
            lines = log.read_text(errors="replace").splitlines()
            print("\n".join(f"    {line}" for line in lines[-25:]), flush=True)
    (args.out / "summary.json").write_text(
        json.dumps({"gpu": smi, "parts": [asdict(o) for o in outcomes]}, indent=1) + "\n"
    )
    for path in RESULTS.glob("*"):
        shutil.copy(path, args.out)
    return int(any(o.result in ("failed", "timed out") for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
