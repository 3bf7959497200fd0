"""A pytest plugin: ``--features FILE`` appends to a CSV the outcomes of tests marked ``feature(framework, feature)``.

Each feature has a row: the worst outcome of its tests, and the framework's version. ``benchmarks/frameworks.py`` makes
the table of docs/frameworks.md from these rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from benchmarks import frameworks, machine, report

_outcomes: dict[tuple[str, str], dict[str, str]] = {}  # by (framework, feature) and test


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--features", type=Path, metavar="FILE", help="append the outcome of each feature as CSV")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("feature"):
            framework, feature = mark.args
            item.user_properties.append(("feature", (framework, feature)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        for key, value in report.user_properties:
            if key == "feature":
                _outcomes.setdefault(cast("tuple[str, str]", tuple(cast("list[str]", value))), {})[report.nodeid] = (
                    report.outcome
                )


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--features")
    if path is None or hasattr(session.config, "workerinput"):
        return
    provenance = machine.provenance("cpu")
    rows = [provenance | frameworks.row(*key, list(tests.values())) for key, tests in sorted(_outcomes.items())]
    report.append(path, rows, frameworks.COLUMNS)
