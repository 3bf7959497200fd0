"""The arguments of an optimizer's step from lists by name, for tests that call the ops directly."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from memkern.schemas import STEP_OPS, StepArgs

MOMENTS = ("exp_avg", "exp_avg_sq")  # what tests call the first and the second, whatever an op does


def names_of(name: str) -> set[str]:
    """The lists that :func:`pack` takes for an op."""
    op = STEP_OPS[name]
    states = {f"{moment}{suffix}" for moment in MOMENTS[: len(op.moments)] for suffix in ("s", "_scales")}
    options = {*StepArgs._fields} - {"moments", "scales", "hyperparameters"}
    options -= {*(() if op.has_trust_ratios else ["trust_ratios"])}
    return states | options | {*op.hyperparameters}


def pack(name: str, lists: dict[str, Any]) -> StepArgs:
    """``lists``: exp_avgs, exp_avg_scales, ... of the moments; one entry per group of each hyperparameter; the rest."""
    op = STEP_OPS[name]
    moments = MOMENTS[: len(op.moments)]
    by_group = zip_longest(*(lists[option] for option in op.hyperparameters))
    made = {
        "moments": [x for moment in moments for x in lists[f"{moment}s"]],
        "scales": [x for moment in moments for x in lists[f"{moment}_scales"]],
        "trust_ratios": lists["trust_ratios"] if op.has_trust_ratios else [],
        "hyperparameters": [float(x) for group in by_group for x in group if x is not None],
    }
    return StepArgs(**{field: lists[field] for field in StepArgs._fields if field in lists} | made)
