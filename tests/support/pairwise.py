"""A pytest plugin: of a test's combinations of parameter values only so many run that every pair of values occurs.

``@pytest.mark.pairwise`` is for tests with three parameters or more. Most failures depend on one or two values (Cohen
et al., The AETG System: An Approach to Testing Based on Combinatorial Design, 1997). Cases without the mark
``full`` are chosen first, then cases with it for the remaining pairs; all other cases get the mark ``long``.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from typing import Any

import pytest

Pair = tuple[tuple[str, int], ...]


def chosen(cases: list[set[Pair]], covered: set[Pair]) -> list[int]:
    """Greedily: each case adds as many new pairs as any could, until none is new. ``covered`` gets all pairs."""
    remaining = {*range(len(cases))}
    chosen_cases = []
    while remaining:
        best = max(sorted(remaining), key=lambda i: len(cases[i] - covered))
        if not cases[best] - covered:
            break
        remaining.remove(best)
        chosen_cases.append(best)
        covered |= cases[best]
    return chosen_cases


def _runs_by_default(item: pytest.Item) -> bool:
    """Whether plain ``pytest`` runs a case: it has no mark long, gpu or emulated, and no skipif that is true."""
    marks = [*item.iter_markers()]
    return not any(m.name in ("long", "gpu", "emulated") or (m.name == "skipif" and m.args[0] is True) for m in marks)


def _pairs(item: Any) -> set[Pair]:
    # Values by id, as some cannot be compared. The cases of a test share the objects.
    return {*combinations(sorted((name, id(value)) for name, value in item.callspec.params.items()), 2)}


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairwise") and _runs_by_default(item):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        covered: set[Pair] = set()
        chosen_ids: set[str] = set()
        for is_full in (False, True):
            tier = [item for item in cases if (item.get_closest_marker("full") is not None) == is_full]
            chosen_ids |= {tier[i].nodeid for i in chosen([_pairs(item) for item in tier], covered)}
        for item in cases:
            if item.nodeid not in chosen_ids:
                item.add_marker("long")
