"""One parameter of a model and what the host has of it: weight, gradient, and their copies to and fro."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...memory import optimizer_bytes
from ..base import BlockwiseOptimizer
from ..dtensor import shards
from ..dtensor.calls import matching
from ..dtensor.shards import is_dtensor, local
from ..format import takes_8bit_state
from ..muon import Muon
from ..state import State
from .transfers import Transfers

Options = dict[str, Any]


@dataclass(eq=False)
class Weight:
    """A parameter of the model, and what the host has of it.

    Of a DTensor the host has this rank's shard: host_param and gradient are DTensors of the parameter's mesh and
    placements, whose local tensors are on the host.
    """

    p: Tensor
    host_param: nn.Parameter
    """The weight that the inner optimizer steps: on the host, or on the device while its state stays there."""
    resident: bool
    """Whether host_param and state stay on the parameter's device."""
    separate: bool
    """Whether host_param has memory of its own, which is copied to p after a step."""
    frozen: bool = False
    """Whether host_param only stands in the groups for p, which needs no gradient."""
    current: Tensor | None = None
    """p's values before a step, on the host where host_param is there; not needed where host_param has p's dtype."""
    buffer: Tensor | None = None
    """Host memory in p's dtype: the gradient on its way here, then the weights on their way back."""
    gradient: Tensor | None = None
    """The gradient of the next step, where the inner optimizer takes it."""
    arrived: Any = None
    """The event of the last copy to the host: of p's values, or of the gradient."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "current": None, "buffer": None, "gradient": None, "arrived": None}

    def follow(self, transfers: Transfers) -> None:
        """Gives host_param the memory, shape and memory format that p has now."""
        p, host_param = local(self.p).detach(), local(self.host_param)
        if not self.separate:
            if (
                host_param.data_ptr() != p.data_ptr()
                or host_param.stride() != p.stride()
                or host_param.shape != p.shape
            ):
                _set_data(self.host_param, p)
            return
        like = torch.empty_like(p, device="meta")  # memory without gaps, in p's memory format
        if host_param.shape != p.shape or host_param.stride() != like.stride():
            values = p if host_param.shape != p.shape else host_param.detach()
            made = torch.empty_like(p, dtype=host_param.dtype) if self.resident else None
            made = transfers.empty_like(p, host_param.dtype) if made is None else made
            _set_data(self.host_param, made.copy_(values))

    def fetch(self, transfers: Transfers) -> None:
        """Begins the copy of p's values to where host_param is: a step goes on from them, whoever has written them."""
        if not self.separate:
            return
        p, host_param = local(self.p).detach(), local(self.host_param)
        if self.resident or transfers.shares_memory:
            self.current = p
        elif host_param.dtype == p.dtype:
            self.arrived = transfers.to_host(host_param.detach(), p)
        else:
            if self.current is None or self.current.shape != p.shape or self.current.dtype != p.dtype:
                self.current = transfers.empty_like(p)
            self.arrived = transfers.to_host(self.current, p)

    def renew(self) -> None:
        """Takes p's values, whose copy has arrived, where host_param does not round to them."""
        if self.separate and self.current is not None:
            host_param, p = local(self.host_param).data, self.current
            rounded = host_param.to(p.dtype)
            if p.device.type != "cpu" or not torch.equal(rounded, p):  # on a device a look at it would wait
                torch.where(rounded == p, host_param, p.to(host_param.dtype), out=host_param)

    def take(self, transfers: Transfers) -> Callable[[], None] | None:
        """Begins the copy of p's gradient, or takes the gradient where it is.

        If a gradient is there already, returns the function that adds this one to it. It is to be called in the thread
        that steps, before anything else goes through the transfers' buffer.
        """
        grad = self.p.grad
        assert grad is not None
        grad = matching(grad, self.p)
        if self.resident or transfers.shares_memory:
            self.gradient = grad if self.gradient is None else self.gradient.add_(grad)
            return None
        if grad.layout != torch.strided:
            raise RuntimeError(f"gradients must be dense to be copied to the host, got {grad.layout}")
        if self.buffer is None or self.buffer.shape != grad.shape:
            self.buffer = transfers.empty_like(self.p.detach(), grad.dtype)
        part = local(grad)
        if self.gradient is None:
            self.arrived, self.gradient = transfers.to_host(local(self.buffer), part), self.buffer
            return None
        buffer, total = transfers.buffer_for(part), local(self.gradient)
        event = transfers.to_host(buffer, part)

        def add() -> None:
            transfers.host_waits(event)
            total.add_(buffer)

        return add

    def copy_back(self, transfers: Transfers) -> Any:
        """Begins the copy of host_param to p; returns its event."""
        p, source, done = local(self.p).detach(), local(self.host_param).detach(), None
        if self.resident or transfers.shares_memory:
            p.copy_(source)
        else:
            if source.dtype != p.dtype:
                assert self.buffer is not None
                source = local(self.buffer).copy_(source)  # the gradient was used
            done = transfers.to_device(p, source, self.arrived)
        if is_dtensor(self.p):
            torch.autograd.graph.increment_version([self.p])
        self.arrived = None
        return done

    def move_to_host(self, inner: Optimizer, transfers: Transfers) -> None:
        """Moves a resident weight and its state to the host."""
        old, self.current = self.host_param, None
        self.resident, self.separate = False, not transfers.shares_memory or old.dtype != self.p.dtype
        if transfers.shares_memory:
            return
        values = transfers.empty_like(old.detach())
        local(values).copy_(local(old).detach())
        self.host_param = nn.Parameter(values, requires_grad=old.requires_grad)
        put_in_place(inner, old, self.host_param)
        if self.gradient is not None:
            self.buffer = transfers.empty_like(self.p.detach(), self.gradient.dtype)
            self.arrived = transfers.to_host(local(self.buffer), local(self.gradient))
            transfers.host_waits(self.arrived)
            self.gradient = self.buffer


def frozen_weight_of(p: Tensor) -> Weight:
    """A parameter that needs no gradient: nothing is copied to the host."""
    return Weight(p, nn.Parameter(p.detach(), requires_grad=False), resident=True, separate=False, frozen=True)


def host_weight_of(p: Tensor, dtype: torch.dtype, resident: bool, transfers: Transfers) -> Weight:
    """A parameter whose weight for the inner optimizer is in ``dtype``, on its own device or on the host."""
    if dtype == p.dtype and (resident or transfers.shares_memory):
        return Weight(p, nn.Parameter(p.detach(), requires_grad=p.requires_grad), resident, separate=False)
    values = torch.empty_like(p.detach(), dtype=dtype) if resident else transfers.empty_like(p.detach(), dtype)
    local(values).copy_(local(p).detach())
    return Weight(p, nn.Parameter(values, requires_grad=p.requires_grad), resident, separate=True)


def put_in_place(inner: Optimizer, old: Tensor, new: Tensor) -> None:
    """Puts a parameter in another's place in an optimizer, with its state on the new one's device."""
    for group in inner.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    state = inner.state.pop(old, {})
    if isinstance(state, State):
        inner.state[new] = state.moved(new)
    elif state:
        inner.state[new] = {k: x.to(new.device) if isinstance(x, Tensor) else x for k, x in state.items()}


def _set_data(p: Tensor, values: Tensor) -> None:
    """``p.data = values``; of a DTensor its local tensor."""
    if is_dtensor(p):
        p._local_tensor = values  # as fully_shard does
    else:
        p.data = values


def bytes_on_device(
    optimizer_class: type[Optimizer], p: Tensor, dtype: torch.dtype, group: Options, options: Options
) -> int:
    """Bytes that a resident weight takes: its state, and itself where it is not the model's parameter.

    Of a DTensor those of its largest shard, as every rank decides alike.
    """
    leave = ("params", "param_names", "max_grad_norm")
    like = torch.empty(p.shape, device="meta") if is_dtensor(p) else p
    given = {key: x for key, x in group.items() if key not in leave}
    rest = {key: x for key, x in options.items() if key not in leave}

    def bytes_of_step(device: str) -> int:
        probe = nn.Parameter(torch.zeros_like(like, dtype=dtype, device=device))
        optimizer = optimizer_class([{**given, "params": [probe]}], **rest)
        probe.grad = torch.zeros_like(probe)
        optimizer.step()
        return optimizer_bytes(optimizer) + (0 if dtype == p.dtype else probe.nbytes)

    try:
        found = bytes_of_step("meta")
    except RuntimeError:  # torch's ASGD and Adafactor read a counter, which meta has no value of
        found = bytes_of_step("cpu")
    return -(-found * elements_of(p) // max(1, p.numel()))


def elements_of(p: Tensor) -> int:
    """The elements of a parameter, or of the largest shard of a DTensor."""
    return math.prod(shards.largest_shard(p))


def has_gradient(w: Weight) -> bool:
    return w.gradient is not None or w.p.grad is not None


_ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def reduction_of_step(optimizer_class: type[Optimizer], p: Tensor, group: Options) -> str | None:
    """Why a step of a parameter, by its group's options, needs other ranks; None, it does not."""
    if not p.requires_grad or shards.ranks_of(p) is None:
        return None
    if not issubclass(optimizer_class, BlockwiseOptimizer):
        return None if optimizer_class in _ELEMENTWISE else "is not known to need no other ranks"
    if optimizer_class.op.has_trust_ratios:
        return "needs norms of whole layers"
    if issubclass(optimizer_class, Muon) and group.get("algorithm", "muon") == "muon":
        return "needs whole matrices"
    given = {**optimizer_class.option_defaults, **group}
    cut = takes_8bit_state(p, given) and shards.cuts_blocks(p, given["block_size"])
    return "needs the largest values of blocks that other ranks have elements of" if cut else None


def check_no_reductions(optimizer_class: type[Optimizer], params: Sequence[Any], group: Options) -> None:
    """Raises ValueError for shards whose step needs other ranks, as it cannot be taken in the backward pass.

    The step's collectives, in a thread of their own, and the backward pass's would come in another order on each rank.
    ``params``: tensors, or pairs of names and tensors. ``group``: their options.
    """
    for p in (item[1] if isinstance(item, tuple) else item for item in params):
        if (reason := reduction_of_step(optimizer_class, p, group)) is not None:
            raise ValueError(
                f"step_in_backward must be False, got True for a DTensor of shape {tuple(p.shape)}: a step of "
                f"{optimizer_class.__name__} {reason}, and would wait for other ranks beside the backward pass's "
                "own collectives; offload_gradients=True frees gradients as early, and steps after the backward pass"
            )


def check_options(host_dtype: Any, device_state_bytes: Any) -> None:
    if host_dtype is not None and host_dtype not in (torch.float32, torch.float64):
        raise ValueError(f"host_dtype must be None, torch.float32 or torch.float64, got {host_dtype!r}")
    whole = isinstance(device_state_bytes, int) and not isinstance(device_state_bytes, bool)
    if device_state_bytes is not None and not (whole and device_state_bytes >= 0):
        raise ValueError(f"device_state_bytes must be None or a number of bytes, 0 or more, got {device_state_bytes!r}")
