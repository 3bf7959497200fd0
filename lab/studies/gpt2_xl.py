"""Trains GPT-2-XL in 9 and in 12 GiB of a CPU's memory by ``python -m memkern train``: peaks and seconds per step.

Each run is a process that trains from random weights on text. Its row has the peak of its resident set, as counted by
the operating system, and the planner's prediction. The run ``by-hand`` compares times: steps of 256 tokens by a short
loop, on random tokens, and by ``train`` with the same techniques, in processes that alternate. ``--model gpt2 --seq-len
64`` tries the runs on a small model, without their memory limits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import RESULTS, ROOT
from lab.studies import study

GIB = 2**30


class Run(NamedTuple):
    """A run of ``train``: its model, its memory limit (``--fit``), tokens per sequence, and the other arguments."""

    model: str
    limit: str
    seq_len: int
    arguments: tuple[str, ...]


RUNS = {
    "xl-9GiB": Run("gpt2-xl", "9GiB", 1024, ("--batch-size", "1", "--steps", "30", "--warmup", "3")),
    "xl-12GiB-accumulated": Run(
        "gpt2-xl", "12GiB", 1024,
        ("--micro-batch", "1", "--accumulation", "64", "--steps", "2", "--clip", "1", "--warmup", "0"),
    ),
    "xl-12GiB-short": Run(
        "gpt2-xl", "12GiB", 128, ("--batch-size", "8", "--steps", "30", "--clip", "1", "--warmup", "3")
    ),
    "medium-3GiB": Run("gpt2-medium", "3GiB", 1024, ("--batch-size", "1", "--steps", "30", "--warmup", "3")),
}  # fmt: skip
BY_HAND = "by-hand"  # the name of the comparison, which is no run of RUNS
COMMON_ARGUMENTS = (
    *("--from-config", "--bytes", "--dropout", "0", "--device", "cpu", "--eval-every", "1000", "--eval-tokens", "1024"),
)
# The techniques of train_by_hand(), as arguments of ``train``.
TECHNIQUES_BY_HAND = ("--precision", "bf16", "--activation-bits", "3", "--checkpointing", "blocks", "--clip", "0")
STEPS_BY_HAND = 6  # the first, which warms up, is not counted
COLUMNS = (
    *("run", "arguments", "techniques", "limit_gib", "predicted_gib", "peak_rss_gib", "steps", "first_loss"),
    *("last_loss", "validation_loss", "median_step_s", "median_micro_batch_s"),
)


def command(run: Run, out: Path, model: str | None, seq_len: int | None, data: Sequence[str]) -> list[str]:
    """The command line of ``train``; without the limit where ``model`` is another one than the run's."""
    is_other = model is not None and model != run.model
    fit = ["--precision", "bf16", "--checkpointing", "blocks"] if is_other else ["--fit", run.limit]
    return [
        *(sys.executable, "-m", "memkern", "train", "--model", model or run.model, *COMMON_ARGUMENTS, *fit),
        *("--seq-len", str(seq_len or run.seq_len), *run.arguments, "--out", str(out)),
        *(("--data", *data) if data else ()),
    ]


def run_and_measure_peak(words: Sequence[str]) -> int:
    """Runs a command line in a process; returns the peak of its resident set in bytes."""
    print("$", *words, flush=True)
    process = subprocess.Popen(words, cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"ended with status {process.returncode}")
    return usage.ru_maxrss * 1024  # Linux counts KiB


def row_of(name: str, model: str | None, seq_len: int | None, data: Sequence[str]) -> dict[str, str]:
    """Makes the run of RUNS with this name; returns its row of the results."""
    run = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        words = command(run, Path(folder), model, seq_len, data)
        peak = run_and_measure_peak(words)
        results = json.loads((Path(folder) / "results.json").read_text())
    [result] = results["runs"]
    config, plan = results["config"], results["plan"]
    micro_batches = config["accumulation"] * config["batch_factor"]
    median = result["median_step_seconds"]
    losses = result["history"]["train_loss"]
    predicted = plan["peak"] if plan else None
    return {
        "run": name,
        "arguments": " ".join(words[2 : words.index("--out")]),
        "techniques": json.dumps(plan["techniques"]) if plan else "",
        "limit_gib": run.limit.removesuffix("GiB") if plan else "",
        "predicted_gib": f"{predicted / GIB:.3f}" if predicted else "",
        "peak_rss_gib": f"{peak / GIB:.3f}",
        "steps": str(len(losses)),
        "first_loss": f"{losses[0]:.4f}",
        "last_loss": f"{losses[-1]:.4f}",
        "validation_loss": f"{result['validation_loss']:.4f}",
        "median_step_s": f"{median:.3f}",
        "median_micro_batch_s": f"{median / micro_batches:.3f}",
    }


def train_by_hand(model: str, seq_len: int) -> None:
    """The loop that ``train`` is compared with; prints the seconds of each step."""
    import torch
    from transformers import AutoModelForCausalLM

    import memkern
    from memkern.planner.models import resolve

    source: Any = resolve(model, seq_len, None, None, 0.0)
    config = source.config
    gpt = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    gpt.gradient_checkpointing_enable({"use_reentrant": False})
    memkern.compress(gpt, 3)
    optimizer = memkern.optim.AdamW8bit(gpt.parameters(), lr=3e-4)
    for _ in range(STEPS_BY_HAND):
        tokens = torch.randint(config.vocab_size, (1, seq_len + 1))
        start = time.perf_counter()
        logits = gpt(input_ids=tokens[:, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        print("seconds", time.perf_counter() - start, flush=True)


def seconds_by_hand(model: str, seq_len: int) -> float:
    """The median seconds of a step of train_by_hand(), in a process of its own."""
    words = [sys.executable, "-m", "lab.studies.gpt2_xl", "--by-hand", model, str(seq_len)]
    process = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    seconds = [float(line.split()[1]) for line in process.stdout.splitlines() if line.startswith("seconds")]
    return statistics.median(seconds[1:])  # without the first step, which warms up


def seconds_by_train(model: str, seq_len: int, data: Sequence[str]) -> float:
    """The median seconds of a step of ``train`` with the same techniques."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *(sys.executable, "-m", "memkern", "train", "--model", model, *COMMON_ARGUMENTS, *TECHNIQUES_BY_HAND),
            *("--batch-size", "1", "--seq-len", str(seq_len), "--steps", str(STEPS_BY_HAND + 1)),
            *("--warmup", "0", "--out", folder),
            *(("--data", *data) if data else ()),
        ]
        run_and_measure_peak(words)
        [result] = json.loads((Path(folder) / "results.json").read_text())["runs"]
    # Without the first step, which warms up, and the last, which is slower as it counts saved bytes too.
    return statistics.median(result["history"]["seconds"][1:-1])


def compare(model: str, seq_len: int, rounds: int, data: Sequence[str]) -> dict[str, str]:
    """A row: the seconds of a step by hand and by ``train``, in processes that alternate."""
    pairs = [(seconds_by_hand(model, seq_len), seconds_by_train(model, seq_len, data)) for _ in range(rounds)]
    by_hand, by_train = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "model": model,
        "seq_len": str(seq_len),
        "rounds": str(rounds),
        "by_hand_s": f"{by_hand:.3f}",
        "recipe_s": f"{by_train:.3f}",
        "ratio": f"{statistics.median(train / hand for hand, train in pairs):.3f}",
    }


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("gpt2_xl", __doc__, RESULTS)
    choices = [*RUNS, BY_HAND]
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"of {', '.join(choices)} (default: all)")
    parser.add_argument("--model", help="another model for all runs")
    parser.add_argument("--seq-len", type=int, help="another length for all runs")
    parser.add_argument("--rounds", type=int, default=3, help=f"rounds of {BY_HAND} (default: 3)")
    parser.add_argument("--data", nargs="+", default=[], help="text (default: Python's standard library)")
    parser.add_argument("--by-hand", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.by_hand:
        train_by_hand(args.by_hand[0], int(args.by_hand[1]))
        return
    if unknown := set(args.runs) - set(choices):
        parser.error(f"{', '.join(sorted(unknown))} given; allowed: {', '.join(choices)}")
    from benchmarks import machine, report

    provenance = machine.provenance("cpu")
    for name in args.runs or choices:
        if name == BY_HAND:
            row = compare(args.model or "gpt2-xl", args.seq_len or 256, args.rounds, args.data)
            report.append(args.out / "gpt2-xl-by-hand.csv", [provenance | row], (*provenance, *row))
            print(row)
            continue
        row = row_of(name, args.model, args.seq_len, args.data)
        report.append(args.out / "gpt2-xl.csv", [provenance | row], (*provenance, *COLUMNS))
        print({key: value for key, value in row.items() if key != "arguments"})


if __name__ == "__main__":
    main()
