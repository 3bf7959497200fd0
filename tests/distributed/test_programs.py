"""Random programs of optimizer steps and edits (programs.py) do on several ranks what they do in one process."""

from __future__ import annotations

import pytest

from tests.distributed import programs
from tests.support.ranks import Ranks

PROGRAMS = 12  # for each number of ranks


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_programs(ranks: Ranks, world: int) -> None:
    assert ranks(world, programs.run, 0, PROGRAMS) == [""] * world
