"""The thread beside the backward pass, which steps and adds up gradients that come several times."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any


class Worker:
    """A thread, begun when it is first needed, that does one thing after the other.

    A wait that Ctrl-C interrupts is begun again at the next call.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self.steps: list[Future[None]] = []
        self._addition: Future[None] | None = None

    def _submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "memkern-offload")
        return self._executor.submit(function, *args)

    def step(self, function: Callable[[Any], None], bucket: Any, ahead: int | None = None) -> None:
        """Begins a step. ahead: waits until no more than so many are left to do, so that their gradients are few."""
        if ahead is not None:
            wait(self.steps[-ahead - 1 : -ahead])
        self.steps.append(self._submit(function, bucket))

    def add(self, addition: Callable[[], None]) -> None:
        """Begins what adds to a gradient, of which there is one at a time."""
        self._addition = self._submit(addition)

    def join_addition(self) -> None:
        if self._addition is not None:
            wait([self._addition])
            addition, self._addition = self._addition, None
            addition.result()

    def join_steps(self) -> list[Future[None]]:
        """Waits for all steps, and returns them: their results may be errors."""
        wait(self.steps)
        steps, self.steps = self.steps, []
        return steps
