"""A pytest plugin: ``--features FILE`` appends the outcomes of the tests marked ``feature(framework, feature)``.

A row for each feature: the outcomes of its tests as one, and the version of the framework. ``benchmarks/frameworks.py``
makes the table of docs/frameworks.md of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from benchmarks import frameworks, machine, report

_outcomes: dict[tuple[str, str], dict[str, str]] = {}


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
    where = machine.provenance("cpu")
    rows = [where | frameworks.row(*key, list(tests.values())) for key, tests in sorted(_outcomes.items())]
    report.append(path, rows, frameworks.COLUMNS)
