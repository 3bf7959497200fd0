"""lab.studies.rate_rules, and the figures that the documentation shows beside published ones."""

import csv
import statistics
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="the benchmarks need the [bench] extra")

from benchmarks import machine
from lab import RESULTS
from lab.studies import large_batch, rate_rules

DOCS = machine.ROOT / "docs"


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def test_the_rates_follow_the_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, float]] = []

    def one(contender: str, factor: int, lr: float, seed: int, steps: int) -> tuple[int, float, float]:
        ran.append((factor, lr))
        return steps // factor, abs(lr - 0.16), 50.0

    monkeypatch.setattr(rate_rules, "one", one)
    found = [*rate_rules.results(steps=16, factors=(4,), seeds=(1,))]
    assert ran[:4] == [(1, lr) for lr in rate_rules.RATES]
    assert ran[4:] == [(1, 0.16), (4, 0.16), (4, 0.32), (4, 0.64)] * len(rate_rules.OPTIMIZERS)
    assert all(tuple(row) == rate_rules.COLUMNS for row in found)
    assert rate_rules.errors(found)["torch SGD", 4, "linear"] == (50.0, 0.0)


def test_the_table_of_rules_is_that_of_the_results() -> None:
    page = (DOCS / "large-batches.md").read_text()
    errors = rate_rules.errors(rows(RESULTS / "rate-rules.csv"))
    for contender, label in (("torch SGD", "torch's SGD"), ("memkern SGD8bit", "`SGD8bit`")):
        for factor in (8, 32):
            base = errors[contender, 1, "base"][0]
            others = [errors[contender, factor, rule][0] for rule in rate_rules.RULES]
            cells = [f"digits, {label}", f"{base:.2f}", f"x{factor}", *(f"{x:.2f}" for x in others)]
            assert f"| {' | '.join(cells)} |" in page


def test_the_table_of_batches_is_that_of_the_results() -> None:
    page = (DOCS / "large-batches.md").read_text()
    found = large_batch.losses(rows(RESULTS / "large-batch.csv"), "large batch")
    for factor in (1, 8, 32):
        means = [statistics.mean(large_batch.last(found[name, factor])) for name in large_batch.OPTIMIZERS]
        cells = [f"x{factor}", f"{large_batch.Setting.steps // factor:,}", *(f"{x:.3f}" for x in means)]
        assert f"| {' | '.join(cells)} |" in page


def test_the_times_of_checkpoints_are_those_of_the_results() -> None:
    page = (DOCS / "what-does-not-fit.md").read_text()
    last: dict[tuple[str, str], dict[str, Any]] = {
        (r["model"], r["mode"]): r for r in rows(machine.ROOT / "benchmarks" / "results" / "gpu-models.csv")
    }
    for model, ratio, peaks in (
        ("Llama, 1.1 B", "1.26", "16,714 to 3,640 MiB"),
        ("GPT-2, 124 M", "1.35", "11,047 to 5,109 MiB"),
    ):
        torch, ours = last[model, "torch"], last[model, "checkpointing"]
        assert f"{float(ours['ms']) / float(torch['ms']):.2f}" == ratio
        assert f"{float(torch['peak_mib']):,.0f} to {float(ours['peak_mib']):,.0f} MiB" == peaks
        assert f" {ratio} |" in page
        assert peaks in page
