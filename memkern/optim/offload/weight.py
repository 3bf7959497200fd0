"""A parameter of a model with the host's weight and gradient for it, and the copies between device and host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..dtensor.calls import match_placements
from ..dtensor.shards import is_dtensor, local
from ..state import State
from .transfers import Transfers

Options = dict[str, Any]  # of an optimizer, or a group


@dataclass(eq=False)
class Weight:
    """A parameter of the model, and the host's weight and gradient for it.

    For a DTensor, host_param and gradient are DTensors of its mesh and placements, whose local tensors, this rank's
    shard, are on the host.
    """

    p: Tensor
    host_param: nn.Parameter
    """The weight on the host, which the inner optimizer steps."""
    separate: bool
    """Whether host_param has memory of its own, which is copied to p after a step."""
    frozen: bool = False
    """Whether p needs no gradient, so that host_param only takes its place in the inner optimizer's groups."""
    current: Tensor | None = None
    """p's values before a step, on the host; None where host_param has p's dtype and takes them itself."""
    buffer: Tensor | None = None
    """Host memory in p's dtype: the gradient on its way here, then the weights on their way back."""
    gradient: Tensor | None = None
    """The gradient of the next step, on the host."""
    arrived: Any = None
    """The event of the last copy to the host: of p's values, or of the gradient."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "current": None, "buffer": None, "gradient": None, "arrived": None}

    def follow(self, transfers: Transfers) -> None:
        """Makes host_param fit p, whose memory, shape or memory format may have changed since the last step."""
        p, host_param = local(self.p).detach(), local(self.host_param)
        if not self.separate:
            own, wanted = ((x.data_ptr(), x.stride(), x.shape) for x in (host_param, p))
            if own != wanted:
                _set_data(self.host_param, p)
            return
        like = torch.empty_like(p, device="meta")  # memory without gaps, in p's memory format
        if host_param.shape != p.shape or host_param.stride() != like.stride():
            values = p if host_param.shape != p.shape else host_param.detach()
            _set_data(self.host_param, transfers.empty_like(p, host_param.dtype).copy_(values))

    def copy_to_host(self, transfers: Transfers) -> None:
        """Begins the copy of p's values to the host. A step starts from them: they may have been edited."""
        if not self.separate:
            return
        p, host_param = local(self.p).detach(), local(self.host_param)
        if transfers.shares_memory:
            self.current = p
        elif host_param.dtype == p.dtype:
            self.current, self.arrived = None, transfers.to_host(host_param.detach(), p)
        else:
            if self.current is None or self.current.shape != p.shape or self.current.dtype != p.dtype:
                self.current = transfers.empty_like(p)
            self.arrived = transfers.to_host(self.current, p)

    def adopt_edits(self) -> None:
        """Takes over edits of p, whose values are on the host now: where host_param does not round to them, it gets
        them."""
        if self.separate and self.current is not None:
            host_param, p = local(self.host_param).data, self.current
            rounded = host_param.to(p.dtype)
            if not torch.equal(rounded, p):
                torch.where(rounded == p, host_param, p.to(host_param.dtype), out=host_param)

    def take_gradient(self, transfers: Transfers) -> Callable[[], None] | None:
        """Begins the copy of p's gradient to the host, or takes p's gradient itself where memory is shared.

        If an earlier gradient is on the host already, returns a function that adds this one to it, which must be called
        before anything else goes through the transfers' buffer.
        """
        grad = self.p.grad
        assert grad is not None
        grad = match_placements(grad, self.p)
        if transfers.shares_memory:
            self.gradient = grad if self.gradient is None else self.gradient.add_(grad)
            return None
        if grad.layout != torch.strided:
            raise RuntimeError(f"gradients must be dense to be copied to the host, got {grad.layout}")
        if self.buffer is None or (self.buffer.shape, self.buffer.dtype) != (grad.shape, grad.dtype):
            self.buffer = transfers.empty_like(self.p.detach(), grad.dtype)
        own = local(grad)
        if self.gradient is None:
            self.arrived, self.gradient = transfers.to_host(local(self.buffer), own), self.buffer
            return None
        buffer, total = transfers.buffer_for(own), local(self.gradient)
        event = transfers.to_host(buffer, own)

        def add() -> None:
            transfers.host_waits(event)
            total.add_(buffer)

        return add

    def copy_back(self, transfers: Transfers) -> Any:
        """Begins the copy of host_param to p; returns its event."""
        p, source, event = local(self.p).detach(), local(self.host_param).detach(), None
        if transfers.shares_memory:
            p.copy_(source)
        else:
            if source.dtype != p.dtype:
                assert self.buffer is not None
                source = local(self.buffer).copy_(source)  # the buffer is free: the step has used the gradient
            # After the copy of the gradient, which follows every use of the parameter in the backward pass.
            event = transfers.to_device(p, source, self.arrived)
        if is_dtensor(self.p):
            torch.autograd.graph.increment_version([self.p])
        self.arrived = None
        return event


def frozen_weight_of(p: Tensor) -> Weight:
    """The Weight of a parameter that needs no gradient: nothing is copied to the host."""
    return Weight(p, nn.Parameter(p.detach(), requires_grad=False), separate=False, frozen=True)


def host_weight_of(p: Tensor, dtype: torch.dtype, transfers: Transfers) -> Weight:
    """The Weight of a parameter whose host_param has this dtype."""
    if dtype == p.dtype and transfers.shares_memory:
        return Weight(p, nn.Parameter(p.detach(), requires_grad=p.requires_grad), separate=False)
    values = transfers.empty_like(p.detach(), dtype)
    local(values).copy_(local(p).detach())
    return Weight(p, nn.Parameter(values, requires_grad=p.requires_grad), separate=True)


def put_in_place(inner: Optimizer, old: Tensor, new: Tensor) -> None:
    """Puts ``new`` in the place of ``old`` in an optimizer, with old's state, moved to new's device."""
    for group in inner.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    state = inner.state.pop(old, {})
    if isinstance(state, State):
        inner.state[new] = state.moved(new)
    elif state:
        inner.state[new] = {key: x.to(new.device) if isinstance(x, Tensor) else x for key, x in state.items()}


def _set_data(p: Tensor, values: Tensor) -> None:
    """``p.data = values``; for a DTensor sets the local tensor."""
    if is_dtensor(p):
        p._local_tensor = values  # as fully_shard does
    else:
        p.data = values


def has_gradient(w: Weight) -> bool:
    """Whether there is a gradient, on the host or on the device."""
    return w.gradient is not None or w.p.grad is not None
