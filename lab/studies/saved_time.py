"""Time of a step by what is saved, beside checkpointing every block.

Models of zoo.py, one sequence, forward and backward pass without the optimizer, all modes in one process and
interleaved; the ratio is the median over rounds of a mode's time over torch's in the same round. Time is the processor
time of the one thread, so that what else runs on a shared machine counts as little as possible.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks import report
from lab.studies import study
from tests.support import zoo

from .saved_models import MODES as ALONE
from .saved_models import PRECISIONS, TOKENS


def _both(model: Any) -> None:
    ALONE["checkpointing"](model)
    ALONE["8"](model)


MODES: dict[str, Callable[[nn.Module], object]] = {
    name: ALONE[name] for name in ("torch", "checkpointing", "exact", "8")
} | {"8 and checkpointing": _both}
MODELS = ("Llama", "GPT-2", "BERT")
FIGURES = ("rounds", "ms", "ratio")
COLUMNS = (*report.PROVENANCE, "transformers", "model", "precision", "tokens", "mode", *FIGURES)


def step(model: nn.Module, batch: dict[str, Any], precision: str) -> float:
    """Seconds of processor time of one forward and backward pass."""
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16 autocast")
    model.zero_grad()
    start = time.process_time()
    with autocast if precision != "bf16" else contextlib.nullcontext():
        loss = model(**batch).loss
    loss.backward()
    return time.process_time() - start


def times(name: str, precision: str, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round by mode, after one that is not counted."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    batch = zoo.batch(name, tokens, dtype)
    models = {}
    for mode, change in MODES.items():
        models[mode] = zoo.build(name, tokens).to(dtype)
        change(models[mode])
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for i in range(rounds + 1):
        for mode, model in models.items():
            seconds = step(model, batch, precision)
            if i > 0:
                found[mode].append(seconds)
            model.zero_grad()
    return found


def rows(models: list[str], precisions: list[str], lengths: list[int], rounds: int) -> Iterator[dict[str, str]]:
    provenance = study.provenance_with_transformers()
    for tokens in lengths:
        for name in models:
            for precision in precisions:
                found = times(name, precision, tokens, rounds)
                for mode, seconds in found.items():
                    ratio = statistics.median(a / b for a, b in zip(seconds, found["torch"], strict=True))
                    ms = f"{1e3 * statistics.median(seconds):.1f}"
                    values = (name, precision, str(tokens), mode, str(rounds), ms, f"{ratio:.3f}")
                    yield study.row(provenance, COLUMNS, values)


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("saved_time", __doc__)
    parser.add_argument("--models", nargs="+", choices=zoo.MODELS, default=list(MODELS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["fp32", "bf16 autocast"])
    parser.add_argument("--tokens", nargs="+", type=int, choices=TOKENS, default=[2048])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    path = args.out / "saved-time.csv"
    study.write(path, rows(args.models, args.precisions, args.tokens, args.rounds), COLUMNS, shown=7)


if __name__ == "__main__":
    main()
