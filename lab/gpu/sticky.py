"""A plugin of pytest: ends the process after a test that left CUDA unusable. lab/gpu/wide.py goes on in another."""

from __future__ import annotations

import os
import sys

import pytest

from lab.gpu import supervised


class Sticky:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.failed: pytest.TestReport | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = report

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self.failed is None or not supervised.is_sticky():
            self.failed = None
            return
        terminal = self.config.pluginmanager.getplugin("terminalreporter")
        crash = getattr(self.failed.longrepr, "reprcrash", None)
        why = (crash.message if crash else self.failed.longreprtext).strip().splitlines()[:1]
        terminal.write_line(f"\n{nodeid} died: CUDA cannot be used any more in this process: {' '.join(why)}")
        terminal.flush()
        sys.stderr.flush()
        os._exit(supervised.STICKY)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Sticky(config))
