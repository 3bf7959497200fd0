"""Runs the cases of every op (tests/support/kernels/cases.py) on the made-up devices. Import after making a Machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lab.emulators.fakegpu import Machine
from tests.support.kernels.backends import Kernels, compare
from tests.support.kernels.cases import CASES, Case


class MadeUp(Kernels):
    """The ops of the made-up devices, for ``compare``."""

    def __init__(self, machine: Machine) -> None:
        super().__init__("made-up", machine.ops)
        self.machine = machine

    def to(self, x: Any) -> Any:
        return self.machine.to_device(x)

    def back(self, x: Any) -> Any:
        return self.machine.to_host(x)


def run(case: Case, machine: Machine) -> None:
    compare(MadeUp(machine), case)


TABLE: dict[str, Callable[[Machine], None]] = {
    name: partial(run, case) for name, case in CASES.items() if case.emulated
}
