"""Random programs under memkern.quantize_saved: tests/compression/saved_programs.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from .saved_programs import outcome

FIRST = 50_000


@pytest.mark.parametrize("part", range(5))
@pytest.mark.full
def test_random_programs(part: int) -> None:
    seeds = range(FIRST + 100 * part, FIRST + 100 * part + 100)
    assert {seed: wrong for seed in seeds if (wrong := outcome(seed)[0])} == {}


def test_a_few_random_programs() -> None:
    assert [wrong for seed in range(10) if (wrong := outcome(seed)[0])] == []


@pytest.mark.full
def test_random_programs_on_four_threads() -> None:
    seeds = range(FIRST, FIRST + 60)
    alone = [outcome(seed) for seed in seeds]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(outcome, seeds)) == alone
