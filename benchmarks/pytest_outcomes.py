"""A pytest plugin: appends what tests had for outcomes to a CSV, with machine and commit.

``--outcomes FILE``: each test's outcome and seconds. ``--features FILE``: each feature's, of the tests that are marked
``feature(framework, feature)``: the worst outcome, and the framework's version. ``benchmarks/frameworks.py`` makes the
table of docs/frameworks.md from these rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from benchmarks import frameworks, machine, report

_seconds: dict[str, float] = {}  # by test: the seconds of set-up, call and tear-down together
_outcomes: dict[str, str] = {}
_features: dict[tuple[str, str], set[str]] = {}  # by (framework, feature): its tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, metavar="FILE", help="add the outcome of each test to a CSV")
    parser.addoption("--features", type=Path, metavar="FILE", help="append the outcome of each feature as CSV")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("feature"):
            item.user_properties.append(("feature", mark.args))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid] = report.outcome
        for key, value in report.user_properties:
            if key == "feature":
                framework, feature = cast("tuple[str, str]", value)
                _features.setdefault((framework, feature), set()).add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    tests, features = session.config.getoption("--outcomes"), session.config.getoption("--features")
    if not (tests or features) or hasattr(session.config, "workerinput"):
        return
    provenance = machine.provenance("cpu")
    if tests:
        rows = [
            provenance | {"test": test, "outcome": outcome, "seconds": f"{_seconds[test]:.1f}"}
            for test, outcome in sorted(_outcomes.items())
        ]
        report.append(tests, rows, [*provenance, "test", "outcome", "seconds"])
    if features:
        outcomes = {key: [_outcomes[test] for test in names] for key, names in sorted(_features.items())}
        rows = [provenance | frameworks.row(*key, outcome) for key, outcome in outcomes.items()]
        report.append(features, rows, frameworks.COLUMNS)
