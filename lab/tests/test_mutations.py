"""Each mutation still fits exactly one place of the sources, and the tests that must catch it exist."""

from lab.mutations.__main__ import MUTATIONS, listed


def test_each_has_its_place_and_its_tests() -> None:
    lost = [mutation.label for i, mutation in enumerate(MUTATIONS, 1) if not listed(i, mutation)]
    assert not lost
