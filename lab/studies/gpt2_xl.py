"""Trains GPT-2-XL on a CPU in 9 and in 12 GiB, by python -m memkern train, and measures its peak and times.

Each run is a process with random weights and real text. Its peak resident set, counted by the operating system, stands
beside the planner's prediction. ``hand``: one micro-batch of 256 tokens by a loop of a few lines and by the recipe with
the same techniques, in processes that alternate. ``--model gpt2 --seq-len 64`` tries the runs on a small model, without
their memory limits.
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
    """A run of the recipe: its model, its limit, and the other arguments."""

    model: str
    limit: str
    seq_len: int
    arguments: tuple[str, ...]


RUNS = {
    "a": Run("gpt2-xl", "9GiB", 1024, ("--batch-size", "1", "--steps", "30", "--warmup", "3")),
    "b": Run(
        "gpt2-xl", "12GiB", 1024,
        ("--micro-batch", "1", "--accumulation", "64", "--steps", "2", "--clip", "1", "--warmup", "0"),
    ),
    "c": Run("gpt2-xl", "12GiB", 128, ("--batch-size", "8", "--steps", "30", "--clip", "1", "--warmup", "3")),
    "medium": Run("gpt2-medium", "3GiB", 1024, ("--batch-size", "1", "--steps", "30", "--warmup", "3")),
}  # fmt: skip
ALWAYS = (
    *("--from-config", "--bytes", "--dropout", "0", "--device", "cpu", "--eval-every", "1000", "--eval-tokens", "1024"),
)
# The techniques of by_hand()'s loop.
BY_HAND = ("--precision", "bf16", "--activation-bits", "3", "--checkpointing", "blocks", "--clip", "0")
HAND_STEPS = 6
COLUMNS = (
    *("run", "arguments", "techniques", "limit_gib", "predicted_gib", "peak_rss_gib", "steps", "first_loss"),
    *("last_loss", "validation_loss", "median_step_s", "median_micro_batch_s"),
)


def command(run: Run, out: Path, model: str | None, seq_len: int | None, data: Sequence[str]) -> list[str]:
    """The recipe's command line; without the limit where the model is not the run's."""
    is_other = model is not None and model != run.model
    fit = ["--precision", "bf16", "--checkpointing", "blocks"] if is_other else ["--fit", run.limit]
    return [
        *(sys.executable, "-m", "memkern", "train", "--model", model or run.model, *ALWAYS, *fit),
        *("--seq-len", str(seq_len or run.seq_len), *run.arguments, "--out", str(out)),
        *(("--data", *data) if data else ()),
    ]


def peak_of(words: Sequence[str]) -> int:
    """Runs a command; returns the peak of its resident set in bytes."""
    print("$", *words, flush=True)
    process = subprocess.Popen(words, cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"ended with status {process.returncode}")
    return usage.ru_maxrss * 1024


def measured(name: str, model: str | None, seq_len: int | None, data: Sequence[str]) -> dict[str, str]:
    """Makes a run; returns its row of the results."""
    run = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        words = command(run, Path(folder), model, seq_len, data)
        peak = peak_of(words)
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


def by_hand(model: str, seq_len: int) -> None:
    """The loop that the recipe is compared with; prints the seconds of each step."""
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
    for _ in range(HAND_STEPS):
        tokens = torch.randint(config.vocab_size, (1, seq_len + 1))
        start = time.perf_counter()
        logits = gpt(input_ids=tokens[:, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        print("seconds", time.perf_counter() - start, flush=True)


def hand_seconds(model: str, seq_len: int) -> float:
    """The median step of by_hand() in a process of its own."""
    words = [sys.executable, "-m", "lab.studies.gpt2_xl", "--by-hand", model, str(seq_len)]
    process = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    seconds = [float(line.split()[1]) for line in process.stdout.splitlines() if line.startswith("seconds")]
    return statistics.median(seconds[1:])


def recipe_seconds(model: str, seq_len: int, data: Sequence[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *(sys.executable, "-m", "memkern", "train", "--model", model, *ALWAYS, *BY_HAND, "--batch-size", "1"),
            *("--seq-len", str(seq_len), "--steps", str(HAND_STEPS + 1), "--warmup", "0", "--out", folder),
            *(("--data", *data) if data else ()),
        ]
        peak_of(words)
        [result] = json.loads((Path(folder) / "results.json").read_text())["runs"]
    return statistics.median(result["history"]["seconds"][1:-1])  # the last step counts saved bytes too, and is slower


def compare(model: str, seq_len: int, rounds: int, data: Sequence[str]) -> dict[str, str]:
    """A micro-batch by hand and by the recipe, in processes that alternate."""
    pairs = [(hand_seconds(model, seq_len), recipe_seconds(model, seq_len, data)) for _ in range(rounds)]
    hand, recipe = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "model": model,
        "seq_len": str(seq_len),
        "rounds": str(rounds),
        "by_hand_s": f"{hand:.3f}",
        "recipe_s": f"{recipe:.3f}",
        "ratio": f"{statistics.median(b / a for a, b in pairs):.3f}",
    }


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("gpt2_xl", __doc__, RESULTS)
    choices = [*RUNS, "hand"]
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"of {', '.join(choices)} (default: all)")
    parser.add_argument("--model", help="another model for all runs")
    parser.add_argument("--seq-len", type=int, help="another length for all runs")
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison with a loop by hand (default: 3)")
    parser.add_argument("--data", nargs="+", default=[], help="text (default: Python's standard library)")
    parser.add_argument("--by-hand", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.by_hand:
        by_hand(args.by_hand[0], int(args.by_hand[1]))
        return
    if unknown := set(args.runs) - set(choices):
        parser.error(f"{', '.join(sorted(unknown))} given; allowed: {', '.join(choices)}")
    from benchmarks import machine, report

    provenance = machine.provenance("cpu")
    for name in args.runs or choices:
        if name == "hand":
            row = compare(args.model or "gpt2-xl", args.seq_len or 256, args.rounds, args.data)
            report.append(args.out / "gpt2-xl-by-hand.csv", [provenance | row], (*provenance, *row))
            print(row)
            continue
        row = measured(name, args.model, args.seq_len, args.data)
        report.append(args.out / "gpt2-xl.csv", [provenance | row], (*provenance, *COLUMNS))
        print({key: value for key, value in row.items() if key != "arguments"})


if __name__ == "__main__":
    main()
