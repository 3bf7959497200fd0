"""A step can be planned for 95 % of transformers' model types, and docs/what-does-not-fit.md has their number."""

from __future__ import annotations

import pytest

from benchmarks import report
from lab import RESULTS
from lab.studies import planned_models as study
from tests.support.helpers import first_full

PATH = RESULTS / "planned-models.csv"
LEAST_SHARE = 0.95  # of the types of which transformers builds a model


def outcomes() -> dict[str, str]:
    return {row["type"]: row["outcome"] for row in report.read(PATH)}


def share_planned(outcomes: dict[str, str]) -> float:
    built = [outcome for outcome in outcomes.values() if not outcome.startswith("not built")]
    return sum(outcome == "planned" for outcome in built) / len(built)


def test_the_page_says_how_many_types_are_planned_for() -> None:
    recorded = outcomes()
    built = sum(not outcome.startswith("not built") for outcome in recorded.values())
    planned = sum(outcome == "planned" for outcome in recorded.values())
    page = (RESULTS.parents[1] / "docs/what-does-not-fit.md").read_text()
    assert f"{planned} of {built} model types" in page
    assert share_planned(recorded) >= LEAST_SHARE


@pytest.mark.full
@pytest.mark.parametrize("kind", first_full(["t5", "mixtral", "bert", "llama", "vit"]))
def test_small_configurations_are_planned_for(kind: str) -> None:
    assert study.outcome(kind)[0] == "planned"


@pytest.mark.long
def test_most_model_types_are_planned_for() -> None:
    assert share_planned({kind: study.outcome(kind)[0] for kind, _ in study.types()}) >= LEAST_SHARE
