"""`make gpu`: everything that a GPU can prove and measure, in one call, on a machine without a network.

torch, nvcc or Triton, and the standard library are enough. What fails or is missing does not stop the rest. Parts that
measure no time run side by side, as the reference and compilers, on the CPU, take most of theirs. Lines of results are
written as they come, to results.jsonl and a log for each part in out/gpu/; at the end (and after every part) all is in
one file, gpu-results.tar.gz, in the folder $OUT or else out/. Ends with 1 where something failed.

Without a GPU each part says what it would do, the extension is built for sm_90, and it ends with 1 but for --plan.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .gpu import Gpu, find_gpu, output
from .parts import forecast, parts, turns
from .runner import ROOT, Outcome, Part, Results, end_all, row_of, run

RESULTS = (":!benchmarks/results", ":!lab/results")  # what measuring itself changes


def environment(gpu: Gpu | None) -> dict[str, object]:
    """What the results are of."""
    import torch

    told = os.environ.get("MEMKERN_COMMIT")
    return {
        "gpu": gpu and gpu.name,
        "capability": gpu and gpu.capability,
        "found by": gpu and gpu.found_by,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "nvcc": (output("nvcc", "--version") or "").rpartition("\n")[2] or None,
        # A copy of a commit's tree, on a machine whose .git is of another commit or lacks, is told which it is.
        "commit": told or output("git", "rev-parse", "--short=12", "HEAD"),
        "dirty": not told and bool(output("git", "status", "--porcelain", "--", ".", *RESULTS)),
    }


def chosen(all_parts: list[Part], wanted: list[str] | None) -> list[Part]:
    known = [part.name for part in all_parts]
    for name in wanted or ():
        if name not in known:
            raise SystemExit(f"make gpu: PART must be one of {', '.join(known)}; got {name!r}")
    return [part for part in all_parts if (part.name in wanted if wanted else not part.by_name)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything (default: 9)")
    parser.add_argument("--patience", type=float, default=1.0, help="times each part's own limit, on a busy machine")
    parser.add_argument("--part", action="append", help="one part; may be given again")
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "gpu", help="for logs and results")
    parser.add_argument("--plan", action="store_true", help="ends with 0 where there is no GPU")
    args = parser.parse_args(argv)
    end = time.monotonic() + 60 * args.minutes
    gpu = find_gpu()
    todo = chosen(parts(gpu and gpu.capability), args.part)
    if args.folder.exists() and any(args.folder.iterdir()) and not (args.folder / "results.jsonl").exists():
        parser.error(f"--folder: {args.folder} has files and no results.jsonl of an earlier run")
    shutil.rmtree(args.folder, ignore_errors=True)
    results = Results(args.folder)
    archive = Path(os.environ.get("OUT") or ROOT / "out") / "gpu-results.tar.gz"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")  # in one piece: parts run side by side
        sys.stdout.flush()

    about = environment(gpu)
    results.add("environment", about)
    say(", ".join(f"{name} {value}" for name, value in about.items() if value) + ("" if gpu else "; no GPU"))
    for line in forecast(todo, end - time.monotonic()):
        say(line)
    outcomes: list[Outcome] = []

    def one(part: Part) -> None:
        say(f"== {part.name}: {part.what}")
        left = min(args.patience * part.seconds, end - time.monotonic())
        name = f"{part.name}:" if part.beside else ""
        outcome = run(part, left, results, lambda line: say(name + line), gpu=gpu is not None)
        outcomes.append(outcome)
        results.add(part.name, row_of(outcome))
        say(f"== {part.name}: {outcome.result}, {outcome.seconds:.1f} s {outcome.reason}".rstrip())
        results.archive(archive)

    try:
        for turn in turns(todo):
            with ThreadPoolExecutor(len(turn)) as pool:
                try:
                    list(pool.map(one, turn))
                except BaseException:  # SIGTERM's too: the pool waits for its threads
                    end_all()
                    raise
    finally:
        results.archive(archive)
        for outcome in outcomes:
            say(f"{outcome.part:16} {outcome.result:10} {outcome.seconds:6.1f} s  {outcome.reason}".rstrip())
        say(f"results: {archive}")
    if gpu is None and not args.plan:
        say("make gpu: no GPU was found by nvidia-smi, by torch or by CUDA's driver; nothing was proved")
        return 1
    return int(any(outcome.result in ("failed", "timed out") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
