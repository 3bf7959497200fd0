"""A pytest plugin: ``--outcomes FILE`` appends each test's outcome and seconds to a CSV, with machine and commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import machine, report

_seconds: dict[str, float] = {}  # by test: set-up, call and tear-down together
_outcomes: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, metavar="FILE", help="add the outcome of each test to a CSV")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--outcomes")
    if path is None or hasattr(session.config, "workerinput"):
        return
    provenance = machine.provenance("cpu")
    rows = [
        provenance | {"test": test, "outcome": outcome, "seconds": f"{_seconds[test]:.1f}"}
        for test, outcome in sorted(_outcomes.items())
    ]
    report.append(path, rows, [*provenance, "test", "outcome", "seconds"])
