"""GPT-2 in transformers' Trainer: memkern's losses beside adamw_torch's."""

from __future__ import annotations

import csv
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from lab import RESULTS
from lab.studies import trainer_gpt2

over_20_steps = pytest.mark.feature("transformers", "Trainer: 20 steps, each loss within 1 % of adamw_torch's")
SMALL: dict[str, Any] = {
    **{"vocab_size": 256, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2},
    **{"bos_token_id": 0, "eos_token_id": 0},
}


def check(rows: list[dict[str, str]], steps: int, falls_to: float) -> None:
    assert [int(row["step"]) for row in rows] == [*range(1, steps + 1)] * 2
    theirs, ours = rows[:steps], rows[steps:]
    for row in rows:
        assert abs(float(row["loss_over_torch"]) - 1) <= 0.01, row
    assert float(theirs[-1]["loss"]) < falls_to * float(theirs[0]["loss"])
    assert int(ours[0]["saved_bytes"]) < int(theirs[0]["saved_bytes"])
    assert int(ours[0]["state_bytes"]) < 0.3 * int(theirs[0]["state_bytes"])


@over_20_steps
@pytest.mark.long
def test_124_million_parameters() -> None:
    check(trainer_gpt2.results(20), 20, falls_to=0.7)


@over_20_steps
@pytest.mark.full
def test_a_small_one() -> None:
    check(trainer_gpt2.results(20, **SMALL), 20, falls_to=0.98)


def test_the_committed_results() -> None:
    with (RESULTS / "trainer-gpt2.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    last = [row for row in rows if row["date"] == rows[-1]["date"]]
    assert int(last[0]["state_bytes"]) > 8 * 124e6  # of the whole model
    check(last, 20, falls_to=0.7)
