"""The committed figures of memkern.quantize_saved hold what docs/saved-tensors.md says of them."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

import pytest

from benchmarks import zoo

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PRECISIONS = ("fp32", "bf16 autocast", "bf16")
Case = tuple[str, str, str, str]


def last(name: str, *columns: str) -> dict[tuple[str, ...], dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return {tuple(row[c] for c in columns): row for row in csv.DictReader(file)}


ROWS = last("saved-models.csv", "model", "precision", "tokens", "mode")


@pytest.mark.parametrize("tokens", ["512", "2048"])
@pytest.mark.parametrize("model", zoo.MODELS)
def test_bytes_and_gradients(model: str, tokens: str) -> None:
    for precision in PRECISIONS:
        for mode in ("torch", "compress", "exact", "8"):
            row = ROWS[model, precision, tokens, mode]
            assert row["dirty"] == "no"
            assert float(row["share"]) <= 1
            if mode in ("exact", "8"):
                assert float(row["gradient_error"]) <= (1e-4 if mode == "exact" else 0.02)
                assert float(row["cosine"]) >= 0.9995
        if model not in zoo.NOT_TRANSFORMERS and precision != "bf16":
            limit = 0.20 if tokens == "512" else 0.25
            assert float(ROWS[model, precision, tokens, "8"]["share"]) <= limit
    if model not in zoo.NOT_TRANSFORMERS:
        assert (model, "fp32", tokens, "checkpointing") in ROWS
        assert float(ROWS[model, "bf16 autocast", tokens, "exact"]["share"]) <= 0.45


def test_losses_are_within_seed_noise() -> None:
    rows = last("saved-parity.csv", "model", "mode", "seed", "steps")
    for model in ("GPT", "Llama"):
        losses = {
            mode: [float(rows[model, mode, str(seed), "300"]["loss"]) for seed in range(3)]
            for mode in ("torch", "exact", "8")
        }
        noise = statistics.stdev(losses["torch"])
        for mode in ("exact", "8"):
            pairs = [a - b for a, b in zip(losses[mode], losses["torch"], strict=True)]
            assert abs(statistics.mean(pairs)) < noise
    noise = statistics.stdev(float(rows["Llama", "torch", str(seed), "300"]["loss"]) for seed in range(3))
    long = {mode: float(rows["Llama", mode, "0", "3000"]["loss"]) for mode in ("torch", "8")}
    assert abs(long["8"] - long["torch"]) < noise


def test_times_of_a_step() -> None:
    rows = last("saved-time.csv", "model", "precision", "tokens", "mode")
    for (model, precision, tokens, mode), row in rows.items():
        if mode in ("exact", "8"):
            assert float(row["ratio"]) <= 1.08, (model, precision, tokens, mode)
