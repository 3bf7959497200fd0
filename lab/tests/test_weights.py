"""The runs of bf16 weights, of 4-bit second moments and of quiet rows, a few steps each."""

import csv
import functools
from pathlib import Path
from typing import Any

import pytest

from lab.studies import bf16_weights, freezing, muon_losses, second_moment

pytestmark = pytest.mark.full


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_weights, "EVAL_TOKENS", 512)


@pytest.mark.parametrize(
    ("part", "options", "rows"),
    [
        ("storage", {"steps": 2, "seeds": [0]}, 5),
        ("small-lr", {"steps": 3, "before": 2}, 11),
        ("accumulation", {"micro_batches": 4, "seeds": 1}, 8),
    ],
)
def test_bf16_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, options: dict[str, Any], rows: int
) -> None:
    monkeypatch.setitem(bf16_weights.PARTS, part, functools.partial(bf16_weights.PARTS[part], **options))
    bf16_weights.main([part, "--out", str(tmp_path)])
    found = rows_of(tmp_path / "bf16-weights.csv")
    assert len(found) == rows
    assert all(tuple(row) == bf16_weights.COLUMNS and float(row["value"]) < 6 for row in found)


@pytest.mark.parametrize(
    ("part", "options", "rows"),
    [("closed-loop", {"steps": 3}, 30), ("training", {"steps": 2, "seeds": [0]}, 2)],
)
def test_second_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, options: dict[str, Any], rows: int
) -> None:
    monkeypatch.setitem(second_moment.PARTS, part, functools.partial(second_moment.PARTS[part], **options))
    second_moment.main([part, "--out", str(tmp_path)])
    found = rows_of(tmp_path / "second-moment.csv")
    assert len(found) == rows
    assert all(tuple(row) == second_moment.COLUMNS for row in found)


def test_muon_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = functools.partial(muon_losses.losses, "small", steps=1, seeds=(0, 1))
    monkeypatch.setitem(muon_losses.PARTS, "small", losses)
    monkeypatch.setattr(muon_losses, "RATES", {"muon": (0.01,), "adamw": (1e-3,)})
    muon_losses.main(["small", "--out", str(tmp_path)])
    found = rows_of(tmp_path / "muon-losses.csv")
    assert [row["optimizer"] for row in found] == [name for name in muon_losses.OPTIMIZERS for _ in (0, 1)]
    assert all(tuple(row) == muon_losses.COLUMNS and 3 < float(row["value"]) < 6 for row in found)
    assert (tmp_path / "muon-losses.png").stat().st_size > 10_000


def test_freezing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freezing, "QUIET_STEPS", 2)
    freezing.main(["--steps", "8", "--every", "4", "--out", str(tmp_path)])
    found = rows_of(tmp_path / "freezing.csv")
    assert len(found) == len(freezing.VARIANTS) * 2 * len(freezing.FIGURES)
    assert {row["states"] for row in found} == {*freezing.VARIANTS}
    assert (tmp_path / "freezing.png").stat().st_size > 10_000
