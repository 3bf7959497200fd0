"""Random programs under memkern.quantize_saved: tests/saved/programs.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from .programs import Program, bytes_left, outcome

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


@pytest.mark.parametrize("programs", [5, pytest.param(100, marks=pytest.mark.full)])
@pytest.mark.usefixtures("no_collector")
def test_as_many_bytes_are_left_as_with_torch(programs: int) -> None:
    for seed in range(FIRST, FIRST + programs):
        assert [bytes_left(Program(seed), bits) for bits in (None, "exact", 8)] == [0, 0, 0], seed
