"""One parameter of a model and what the host has of it: weight, gradient, and their copies to and fro."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...memory import optimizer_bytes
from ..dtensor.shards import is_dtensor
from .transfers import Transfers

Options = dict[str, Any]


@dataclass(eq=False)
class Weight:
    """A parameter of the model, and what the host has of it."""

    p: Tensor
    host_param: nn.Parameter
    """What the inner optimizer steps: on the host, or on the device while its state stays there."""
    resident: bool
    """Whether host_param and state stay on the parameter's device."""
    own: bool
    """Whether host_param has memory of its own, which is copied to p after a step."""
    current: Tensor | None = None
    """p's values before a step, on the host where host_param is there; not needed where host_param has p's dtype."""
    buffer: Tensor | None = None
    """Host memory in p's dtype: the gradient on its way here, then the weights on their way back."""
    gradient: Tensor | None = None
    """The gradient of the next step, where the inner optimizer takes it."""
    arrived: Any = None
    """The event of its copy."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "current": None, "buffer": None, "gradient": None, "arrived": None}

    def fetch(self, transfers: Transfers) -> None:
        """Begins the copy of p's values to where host_param is: a step goes on from them, whoever has written them."""
        p, host_param = self.p.detach(), self.host_param
        if not self.own:
            if (
                host_param.data_ptr() != p.data_ptr()
                or host_param.stride() != p.stride()
                or host_param.shape != p.shape
            ):
                host_param.data = p
            return
        if host_param.shape != p.shape:
            host_param.data = torch.empty_like(p, dtype=host_param.dtype, device=host_param.device).copy_(p)
        if self.resident or transfers.shares_memory:
            self.current = p
        elif host_param.dtype == p.dtype:
            self.arrived = transfers.to_host(host_param.detach(), p)
        else:
            if self.current is None or self.current.shape != p.shape or self.current.dtype != p.dtype:
                self.current = transfers.empty_like(p)
            self.arrived = transfers.to_host(self.current, p)

    def renew(self) -> None:
        """Where host_param does not round to p's values, takes those. Their copy has arrived."""
        if self.own and self.current is not None:
            host_param, p = self.host_param.data, self.current
            rounded = host_param.to(p.dtype)
            if p.device.type != "cpu" or not torch.equal(rounded, p):  # on a device a look at it would wait
                torch.where(rounded == p, host_param, p.to(host_param.dtype), out=host_param)

    def take(self, transfers: Transfers) -> Callable[[], None] | None:
        """Begins the copy of p's gradient, or takes the gradient where it is.

        If a gradient is there already, returns the function that adds this one to it. It is to be called in the thread
        that steps, before anything else goes through the transfers' room.
        """
        grad = self.p.grad
        assert grad is not None
        if self.resident or transfers.shares_memory:
            self.gradient = grad if self.gradient is None else self.gradient.add_(grad)
            return None
        if grad.layout != torch.strided:
            raise RuntimeError(f"gradients must be dense to be copied to the host, got {grad.layout}")
        if self.buffer is None or self.buffer.shape != grad.shape:
            self.buffer = transfers.empty_like(self.p.detach(), grad.dtype)
        if self.gradient is None:
            self.arrived, self.gradient = transfers.to_host(self.buffer, grad), self.buffer
            return None
        room, total = transfers.room_for(grad), self.gradient
        event = transfers.to_host(room, grad)

        def add() -> None:
            transfers.host_waits(event)
            total.add_(room)

        return add

    def copy_back(self, transfers: Transfers) -> Any:
        """Begins the copy of host_param to p; returns its event."""
        source, done = self.host_param.detach(), None
        if self.resident or transfers.shares_memory:
            self.p.copy_(source)
        else:
            if source.dtype != self.p.dtype:
                assert self.buffer is not None
                source = self.buffer.copy_(source)  # the gradient was used
            done = transfers.to_device(self.p.detach(), source, self.arrived)
        self.arrived = None
        return done

    def move_to_host(self, inner: Optimizer, transfers: Transfers) -> None:
        """Moves a resident weight and its state to the host."""
        old, self.current = self.host_param, None
        self.resident, self.own = False, not transfers.shares_memory or old.dtype != self.p.dtype
        if transfers.shares_memory:
            return
        values = transfers.empty_like(old.detach()).copy_(old.detach())
        self.host_param = nn.Parameter(values, requires_grad=old.requires_grad)
        for group in inner.param_groups:
            group["params"] = [self.host_param if p is old else p for p in group["params"]]
        if state := inner.state.pop(old, {}):
            inner.state[self.host_param] = {
                k: x.cpu() if isinstance(x, Tensor) else x for k, x in state.items()
            }
        if self.gradient is not None:
            self.buffer = transfers.empty_like(self.p.detach(), self.gradient.dtype)
            self.arrived = transfers.to_host(self.buffer, self.gradient)
            transfers.host_waits(self.arrived)
            self.gradient = self.buffer


def host_weight_of(p: Tensor, dtype: torch.dtype, resident: bool, transfers: Transfers) -> Weight:
    """A parameter whose weight for the inner optimizer is in ``dtype``, on its own device or on the host."""
    if dtype == p.dtype and (resident or transfers.shares_memory):
        return Weight(p, nn.Parameter(p.detach(), requires_grad=p.requires_grad), resident, own=False)
    values = (
        torch.empty_like(p.detach(), dtype=dtype) if resident else transfers.empty_like(p.detach(), dtype)
    )
    host_param = nn.Parameter(values.copy_(p.detach()), requires_grad=p.requires_grad)
    return Weight(p, host_param, resident, own=True)


def bytes_on_device(
    optimizer_class: type[Optimizer], p: Tensor, dtype: torch.dtype, group: Options, options: Options
) -> int:
    """Bytes that a resident weight takes: its state, and itself where it is not the model's parameter."""
    leave = ("params", "param_names", "max_grad_norm")
    meta = nn.Parameter(torch.empty_like(p, dtype=dtype, device="meta"))
    given = {key: x for key, x in group.items() if key not in leave}
    probe = optimizer_class(
        [{**given, "params": [meta]}], **{key: x for key, x in options.items() if key not in leave}
    )
    meta.grad = torch.empty_like(meta)
    probe.step()
    return optimizer_bytes(probe) + (0 if dtype == p.dtype else meta.nbytes)


def has_gradient(w: Weight) -> bool:
    return w.gradient is not None or w.p.grad is not None


def copy_options(source: Optimizer, to: Optimizer) -> None:
    """Sets every option of one's groups to the other's."""
    for given, group in zip(source.param_groups, to.param_groups, strict=False):
        group.update((key, x) for key, x in given.items() if key != "params")


def check_no_shards(params: Sequence[Tensor]) -> None:
    """Raises ValueError for DTensors, whose wrappers have no memory that could be copied."""
    for p in params:
        if is_dtensor(p):
            raise ValueError(
                f"params must be plain tensors, got a DTensor of shape {tuple(p.shape)}; with fully_shard's "
                "offload_policy=CPUOffloadPolicy() parameters, gradients and states are on the host, and the "
                "optimizer without HostOffload steps there"
            )


def check_options(host_dtype: Any, device_state_bytes: Any) -> None:
    if host_dtype is not None and host_dtype not in (torch.float32, torch.float64):
        raise ValueError(f"host_dtype must be None, torch.float32 or torch.float64, got {host_dtype!r}")
    whole = isinstance(device_state_bytes, int) and not isinstance(device_state_bytes, bool)
    if device_state_bytes is not None and not (whole and device_state_bytes >= 0):
        raise ValueError(
            f"device_state_bytes must be None or a number of bytes, 0 or more, got {device_state_bytes!r}"
        )
