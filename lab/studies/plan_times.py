"""Processor time of ``memkern.plan`` for presets, without the cache of plans, imports included.

Each plan runs in a process of its own on one thread; the time of the process with fake CUDA is added. The row has what
is recommended and its peak, so that rows of two commits tell whether a plan has changed.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import report
from lab.studies import study

CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"memory": "4GiB", "seq_len": 1024, "batch_size": 8},
    "gpt2-xl": {"memory": "12GiB", "seq_len": 1024},
    "bert-large": {"memory": "12GiB", "seq_len": 512, "batch_size": 32},
    "roberta-large": {"memory": "8GiB", "seq_len": 512, "batch_size": 16},
    "tinyllama-1.1b": {"memory": "12GiB", "seq_len": 2048, "batch_size": 4},
    "llama-3.1-8b": {"memory": "24GiB", "seq_len": 4096},
    "llama-3.1-70b": {"memory": "80GiB", "seq_len": 4096},
    "qwen3-8b": {"memory": "80GiB", "seq_len": 4096, "batch_size": 4},
    "vit-huge": {"memory": "12GiB", "batch_size": 32},
}
COLUMNS = (*report.PROVENANCE, "transformers", "model", "arguments", "seconds", "recommended", "peak_mib")
PLAN = """
import json, sys, memkern
plan = memkern.plan(sys.argv[1], cache=False, **json.loads(sys.argv[2]))
best = plan.recommended
print(json.dumps([str(best.techniques), best.peak] if best else ["nothing fits", plan.together.peak]))
"""


def planned(model: str) -> tuple[float, str, int]:
    """Processor seconds, what is recommended, and its peak in bytes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", PLAN, model, json.dumps(CASES[model])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    techniques, peak = json.loads(done.stdout.splitlines()[-1])
    return seconds, techniques, peak


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("plan_times", __doc__)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args(argv)
    provenance = study.provenance_with_transformers()

    def rows() -> Iterator[dict[str, str]]:
        for model in args.models:
            seconds, techniques, peak = planned(model)
            values = (model, json.dumps(CASES[model]), f"{seconds:.1f}", techniques, f"{peak / 2**20:.1f}")
            yield study.row(provenance, COLUMNS, values)

    study.write(args.out / "plan-times.csv", rows(), COLUMNS, 5)


if __name__ == "__main__":
    main()
