"""Copies between a device and the host, and their events: of a device with streams, of the CPU, of fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]
"""A copy's parts: where to, and from where."""


class Copies:
    """Copies where the device is the CPU: each is complete when the call returns, and an event is nothing."""

    def slab(self, size: int) -> Any:
        """Host memory."""
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def stream(self) -> Any:
        """The current stream, on which tensors are allocated and used."""
        return None

    def down(self, pairs: Pairs, after: Any) -> Any:
        """Copies to the host, after what the current stream does and after an event; the copy's event."""
        return self._copy(pairs)

    def up(self, pairs: Pairs, after: Any) -> Any:
        """Copies to the device, after what the current stream does and after an event; the copy's event."""
        return self._copy(pairs)

    def wait(self, event: Any) -> None:
        """The current stream waits for an event."""

    def is_done(self, event: Any) -> bool:
        """Whether an event is known to be complete; does not wait."""
        return True

    def is_capturing(self) -> bool:
        """Whether the current stream's work goes into a graph, whose events nobody can ask."""
        return False

    def used_here(self, x: Tensor) -> None:
        """The current stream, on which x was not allocated, uses it."""

    @staticmethod
    def _copy(pairs: Pairs) -> None:
        for to, x in pairs:
            to.copy_(x, non_blocking=True)


class StreamCopies(Copies):
    """Copies of a device that has streams, from and to pinned memory. ``module``: torch.cuda or its like."""

    def __init__(self, device: torch.device, module: Any) -> None:
        self.device, self.module = device, module
        self._is_capturing = getattr(module, "is_current_stream_capturing", super().is_capturing)
        self._down, self._up = module.Stream(device), module.Stream(device)

    def slab(self, size: int) -> Any:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def stream(self) -> Any:
        return self.module.current_stream(self.device)

    def down(self, pairs: Pairs, after: Any) -> Any:
        return self._copy_on(self._down, pairs, after)

    def up(self, pairs: Pairs, after: Any) -> Any:
        return self._copy_on(self._up, pairs, after)

    def _copy_on(self, stream: Any, pairs: Pairs, after: Any) -> Any:
        # Of a copy down the current stream has made the values, of one up it has used the memory before.
        stream.wait_stream(self.stream())
        if after is not None:
            stream.wait_event(after)
        with self.module.stream(stream):
            self._copy(pairs)
        return stream.record_event()

    def wait(self, event: Any) -> None:
        self.stream().wait_event(event)

    def is_done(self, event: Any) -> bool:
        return event.query()

    def is_capturing(self) -> bool:
        return self._is_capturing()

    def used_here(self, x: Tensor) -> None:
        x.record_stream(self.stream())


class FakeCopies(Copies):
    """Copies of fake tensors, of which nothing is copied: one down takes until something waits, or one up begins."""

    def __init__(self) -> None:
        self.ups = 0

    def slab(self, size: int) -> Any:
        return None

    def down(self, pairs: Pairs, after: Any) -> Any:
        return self.ups

    def up(self, pairs: Pairs, after: Any) -> Any:
        self.ups += 1
        return self.ups

    def is_done(self, event: Any) -> bool:
        return event < self.ups


def copies_of(device: torch.device) -> Copies:
    return Copies() if device.type == "cpu" else StreamCopies(device, torch.get_device_module(device))


# ---- fake tensors that come back

_transfers = 0


def is_in_transfer() -> bool:
    """Whether a fake tensor is made now that stands for one that comes back: no operator of the model does so."""
    return _transfers > 0


@contextlib.contextmanager
def made_by_a_transfer(mode: Any) -> Iterator[None]:
    global _transfers
    _transfers += 1
    try:
        with mode:
            yield
    finally:
        _transfers -= 1
