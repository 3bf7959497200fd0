"""A pytest plugin: ``--outcomes FILE`` writes what became of each test, as CSV, with the machine and the commit."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import machine

_seconds: dict[str, float] = {}
_outcomes: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, metavar="FILE", help="write the outcome of each test as CSV")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--outcomes")
    if path is None or hasattr(session.config, "workerinput"):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        where = machine.provenance("cpu")
        out.writerow([*where, "test", "outcome", "seconds"])
        for test, outcome in sorted(_outcomes.items()):
            out.writerow([*where.values(), test, outcome, f"{_seconds[test]:.1f}"])
