"""The plugin that leaves combinations of parameters to `make test-long`."""

import itertools

from tests.support.pairwise import chosen


def test_every_pair_is_in_a_case() -> None:
    parameters = {"a": range(3), "b": range(4), "c": range(2), "d": range(3)}
    cases = [
        {*itertools.combinations(zip(parameters, values, strict=True), 2)}
        for values in itertools.product(*parameters.values())
    ]
    covered: set = set()
    found = chosen(cases, covered)
    assert covered == set().union(*cases)
    assert len(found) == len({*found}) < 17 < len(cases)  # the two largest have 12 pairs
    assert chosen(cases, covered) == []  # nothing is left for the next tier
