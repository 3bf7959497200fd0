"""A pytest plugin: with MEMKERN_STRICT_SKIPS=1, a skip whose reason no line of skips.txt allows fails the run.

So a check that no longer runs, because a compiler or a package has gone, is not taken for one that passed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

ALLOWED = Path(__file__).resolve().parents[1] / "fixtures" / "skips.txt"
_unlisted: set[str] = set()


def allowed() -> list[re.Pattern[str]]:
    lines = [line.partition("#")[0].strip() for line in ALLOWED.read_text().splitlines()]
    return [re.compile(line) for line in lines if line]


def _note(report: Any) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not any(pattern.fullmatch(reason) for pattern in allowed()):
            _unlisted.add(f"{report.nodeid}: {reason}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A hook of pytest-xdist, which does not pass on the skips of a worker's collection: adds them here."""
    _unlisted.update(getattr(node, "workeroutput", {}).get("unlisted skips", ()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["unlisted skips"] = sorted(_unlisted)
    elif _unlisted and os.environ.get("MEMKERN_STRICT_SKIPS") == "1" and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _unlisted and os.environ.get("MEMKERN_STRICT_SKIPS") == "1":
        terminalreporter.section(f"skips for reasons that {ALLOWED.name} does not list")
        for line in sorted(_unlisted):
            terminalreporter.line(line, red=True)
