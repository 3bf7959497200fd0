"""Copies tensors between a device and the host; events order the copies and the work on the tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dtensor.shards import is_dtensor
from .pinned import pinned_if_possible


class Transfers:
    """Copies where the device is the CPU: each is complete when the call returns, and events are None.

    Its methods are the interface of :class:`StreamTransfers`, too.
    """

    shares_memory = True
    """Whether the host can compute with the device's tensors, so that nothing needs to be copied."""

    def empty_like(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Host memory like a tensor; like a DTensor, a DTensor of its mesh with this rank's part on the host."""
        return torch.empty_like(x, dtype=dtype, device="cpu", requires_grad=False)

    def to_host(self, host: Tensor, x: Tensor) -> Any:
        """Copies ``x`` after the current stream's work on it, and returns the copy's event; ``x`` may be freed."""
        host.copy_(x)
        return None

    def to_device(self, x: Tensor, host: Tensor, *after: Any) -> Any:
        """Copies to ``x`` after these events; returns the copy's event, until which ``host`` must not be written."""
        x.copy_(host)
        return None

    def now(self) -> Any:
        """An event after all work that is in the current stream by now."""
        return None

    def host_memory(self, size: int) -> Tensor:
        """A tensor of so many bytes, uint8, on the host."""
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def buffer_for(self, x: Tensor) -> Tensor:
        """Host memory with a tensor's shape and dtype, which the next call may return again."""
        buffer: Tensor | None = vars(self).get("_buffer")
        if buffer is None or buffer.nbytes < x.nbytes:
            buffer = self._buffer = self.empty_like(torch.empty(x.nbytes, dtype=torch.uint8, device="meta"))
        return buffer[: x.nbytes].view(x.dtype).view(x.shape)

    def host_waits(self, event: Any) -> None:
        """Waits on the host until an event is complete."""

    def device_waits(self, event: Any) -> None:
        """Makes the current stream's further work begin after an event."""


class StreamTransfers(Transfers):
    """Copies of a device that has streams: one stream for each direction, from and to pinned memory."""

    shares_memory = False

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        self.down, self.up = self.module.Stream(device), self.module.Stream(device)  # to the host, to the device

    def empty_like(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        host = super().empty_like(x, dtype)
        if is_dtensor(host):
            host._local_tensor = host._local_tensor.pin_memory()
            return host
        return host.pin_memory()

    def to_host(self, host: Tensor, x: Tensor) -> Any:
        self.down.wait_event(self.now())
        with self.module.stream(self.down):
            host.copy_(x, non_blocking=True)
        x.record_stream(self.down)  # its memory is not given to others before the copy is complete
        return self._event(self.down)

    def to_device(self, x: Tensor, host: Tensor, *after: Any) -> Any:
        for event in after:
            self.up.wait_event(event)
        with self.module.stream(self.up):
            x.copy_(host, non_blocking=True)
        x.record_stream(self.up)
        return self._event(self.up)

    def now(self) -> Any:
        return self._event(self.module.current_stream(self.device))

    def host_memory(self, size: int) -> Tensor:
        return pinned_if_possible(size)

    def host_waits(self, event: Any) -> None:
        event.synchronize()

    def device_waits(self, event: Any) -> None:
        self.module.current_stream(self.device).wait_event(event)

    def _event(self, stream: Any) -> Any:
        event = self.module.Event()
        event.record(stream)
        return event


def transfers_of(device: torch.device) -> Transfers:
    """The transfers of a device."""
    return Transfers() if device.type == "cpu" else StreamTransfers(device)
