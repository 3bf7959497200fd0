"""Copies between a device and the host, in the order that their events give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dtensor.shards import is_dtensor
from .pinned import pinned_if_possible


class Transfers:
    """Copies where the device is the CPU: each is complete when the call returns, and events are None.

    It is also the interface of :class:`StreamTransfers`.
    """

    shares_memory = True
    """Whether the host can compute with the device's tensors, so that nothing need be copied."""

    def empty_like(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Host memory for a tensor's values; for those of this rank where it is a DTensor, and then one of its mesh."""
        return torch.empty_like(x, dtype=dtype, device="cpu", requires_grad=False)

    def to_host(self, host: Tensor, x: Tensor) -> Any:
        """Copies ``x`` after the current stream's work on it, and returns the copy's event; ``x`` may be freed."""
        host.copy_(x)
        return None

    def to_device(self, x: Tensor, host: Tensor, *after: Any) -> Any:
        """Copies to ``x`` after these events; returns the copy's event, before which ``host`` may not be written."""
        x.copy_(host)
        return None

    def now(self) -> Any:
        """An event after all that the current stream was given."""
        return None

    def host_memory(self, size: int) -> Tensor:
        """A tensor of so many bytes, uint8, on the host."""
        return torch.empty(size, dtype=torch.uint8)

    def buffer_for(self, x: Tensor) -> Tensor:
        """Host memory with a tensor's shape and dtype; the next call may return the same."""
        buffer: Tensor | None = vars(self).get("_buffer")
        if buffer is None or buffer.nbytes < x.nbytes:
            buffer = self._buffer = self.empty_like(torch.empty(x.nbytes, dtype=torch.uint8, device="meta"))
        return buffer[: x.nbytes].view(x.dtype).view(x.shape)

    def host_waits(self, event: Any) -> None:
        """Returns when an event is complete."""

    def device_waits(self, event: Any) -> None:
        """Work given to the current stream from now on begins after an event."""


class StreamTransfers(Transfers):
    """Copies of a device that has streams: one stream for each direction, from and to pinned memory."""

    shares_memory = False

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        self.down, self.up = self.module.Stream(device), self.module.Stream(device)

    def empty_like(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        made = super().empty_like(x, dtype)
        if is_dtensor(made):
            made._local_tensor = made._local_tensor.pin_memory()
            return made
        return made.pin_memory()

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
