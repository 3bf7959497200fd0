"""LateHostOffload, whose copies between host and device are made only when something waits for them.

Where a wait is missing, the code reads NaN or old values, and its test fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memkern.optim import HostOffload
from memkern.optim.offload.transfers import Transfers


class LateTransfers(Transfers):
    """A copy is made when something waits for its event, with all earlier copies of its direction; all on the CPU.

    An event is (direction, number of copies up to it); ``log`` has the events, and the waits for them, in order.
    """

    shares_memory = False

    def __init__(self, device: torch.device, log: list[Any] | None = None) -> None:
        self.queues: dict[str, list[Callable[[], Any]]] = {"down": [], "up": []}
        self.copied = {"down": 0, "up": 0}  # how many copies to the host, and to the device, are made
        self.log: list[Any] = [] if log is None else log

    def empty_like(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        empty = super().empty_like(x, dtype)
        return empty.fill_(torch.nan) if empty.is_floating_point() else empty

    def to_host(self, host: Tensor, x: Tensor) -> Any:
        return self._begin("down", host, x)

    def to_device(self, x: Tensor, host: Tensor, *after: Any) -> Any:
        assert after
        assert None not in after
        return self._begin("up", x, host, *after)

    def now(self) -> Any:
        return "down", 0

    def host_waits(self, event: Any) -> None:
        self.log.append(("host waits", event))
        self._make(event)

    def device_waits(self, event: Any) -> None:
        self.log.append(("device waits", event))
        self._make(event)

    def _begin(self, direction: str, to: Tensor, source: Tensor, *after: Any) -> Any:
        def copy() -> None:
            for event in after:
                self._make(event)
            with torch.no_grad():
                to.copy_(source)

        self.queues[direction].append(copy)
        event = (direction, len(self.queues[direction]))
        self.log.append(event)
        return event

    def _make(self, event: Any) -> None:
        if event is not None:
            direction, count = event
            while self.copied[direction] < count:
                copy = self.queues[direction][self.copied[direction]]
                self.copied[direction] += 1
                copy()


class LateHostOffload(HostOffload):
    """HostOffload as on a device: its copies are late."""

    _transfers_of = staticmethod(LateTransfers)
