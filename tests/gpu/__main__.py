"""`make gpu`: everything that a GPU can prove and measure, in one call, on a machine without a network.

torch, nvcc or Triton, and the standard library are enough. What fails or is missing does not stop the rest. Lines of
results are written as they come, to results.jsonl and a log for each part in out/gpu/; at the end (and after every
part) all is in one file, gpu-results.tar.gz, in the folder $OUT or else out/. Ends with 1 where something failed.

Without a GPU each part says what it would do, and the extension is built for sm_90.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import sys
import time
from pathlib import Path

from .parts import capability, output, parts
from .runner import ROOT, Outcome, Part, Results, row_of, run


def environment(arch: str | None) -> dict[str, object]:
    """What the results are of."""
    import torch

    smi = output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    return {
        "gpu": smi,
        "capability": arch,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "nvcc": (output("nvcc", "--version") or "").rpartition("\n")[2] or None,
        # A copy of the tree without .git gets its commit from the environment.
        "commit": output("git", "rev-parse", "--short=12", "HEAD") or os.environ.get("MEMKERN_COMMIT"),
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
    parser.add_argument(
        "--patience", type=float, default=1.0, help="times each part's own limit, on a busy machine"
    )
    parser.add_argument("--part", action="append", help="one part; may be given again")
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "gpu", help="for logs and results")
    args = parser.parse_args(argv)
    end = time.monotonic() + 60 * args.minutes
    arch = capability()
    todo = chosen(parts(arch), args.part)
    shutil.rmtree(args.folder, ignore_errors=True)
    results = Results(args.folder)
    archive = Path(os.environ.get("OUT") or ROOT / "out") / "gpu-results.tar.gz"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    def say(line: str) -> None:
        print(line, flush=True)

    about = environment(arch)
    results.add("environment", about)
    say(", ".join(f"{name} {value}" for name, value in about.items() if value) + ("" if arch else "; no GPU"))
    outcomes: list[Outcome] = []
    try:
        for part in todo:
            say(f"== {part.name}: {part.what}")
            left = end - time.monotonic()
            outcome = run(part, min(args.patience * part.seconds, left), results, say, gpu=arch is not None)
            outcomes.append(outcome)
            results.add(part.name, row_of(outcome))
            say(f"== {part.name}: {outcome.result}, {outcome.seconds:.1f} s {outcome.reason}".rstrip())
            results.archive(archive)
    finally:
        results.archive(archive)
        for outcome in outcomes:
            say(f"{outcome.part:16} {outcome.result:10} {outcome.seconds:6.1f} s  {outcome.reason}".rstrip())
        say(f"results: {archive}")
    return int(any(outcome.result in ("failed", "timed out") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
