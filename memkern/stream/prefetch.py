"""Copies weights from the host to the device ahead of time: those of the next parameter group while one computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..optim.dtensor.shards import is_dtensor


class Group:
    """A parameter group of ``fully_shard``: a module whose weights are unsharded and resharded together.

    others: the modules of other groups. in_backward: whether its backward pass reads the weights.
    """

    def __init__(self, module: Any, others: set[nn.Module], in_backward: bool = True) -> None:
        self.module, self.in_backward = module, in_backward
        self.owners = [*owners(module, others)]  # the modules that have the parameters
        self.params: list[Tensor] = []  # the sharded ones, which are on the host
        self.note_params()

    def note_params(self) -> None:
        """Notes the sharded parameters, which others may have replaced. To be called while none is unsharded."""
        self.params = [*dict.fromkeys(p for owner in self.owners for p in owner.parameters(recurse=False))]

    def _on_device(self) -> Iterator[Tensor]:
        """The unsharded weights."""
        return (p for owner in self.owners for p in owner.parameters(recurse=False) if not is_dtensor(p))

    @property
    def is_unsharded(self) -> bool:
        """Whether the weights are on the device, or on their way there."""
        return any(True for _ in self._on_device())

    def forget_gradients(self) -> None:
        """Frees gradients of weights that are on the device."""
        for p in self._on_device():
            p.grad = None


def owners(module: nn.Module, others: set[nn.Module]) -> Iterator[nn.Module]:
    """The modules whose parameters belong to a group: those of ``module`` that are in no other one."""
    if any(True for _ in module.parameters(recurse=False)):
        yield module
    for child in module.children():
        if child not in others:
            yield from owners(child, others)


class Prefetch:
    """Copies the weights of the next group to the device while one computes, in a stream of copies (``up``).

    With one process ``fully_shard`` copies a group's weights in the computing stream, when the group begins. So each
    group is unsharded from here, in ``up``, before it begins, and ``fully_shard`` has nothing to do. In a forward pass
    the next group is the one that followed in the last forward pass; in a backward pass it is the one that came before
    in the forward pass. ``up`` may reuse memory that the computing stream has freed. So each copy waits for the groups
    that were launched before it, and overlaps the group that is launched next.

    streams: torch.cuda, or what stands for it.
    """

    def __init__(self, device: torch.device, streams: Any) -> None:
        self.device, self.streams = device, streams
        self.up = streams.Stream(device)
        self.last_order: list[Group] = []  # groups in the order of the last whole forward pass
        self.order: list[Group] = []  # groups of the current forward pass so far
        self._copies: dict[Group, Any] = {}  # the copies' events, until the computing stream waits for them

    def begin_copy(self, group: Group) -> None:
        """Begins the copy of a group's weights, unless they are on the device."""
        if group.is_unsharded:
            return
        self.up.wait_stream(self.streams.current_stream(self.device))
        with self.streams.stream(self.up):
            group.module.unshard()
        self._copies[group] = self.up.record_event()

    def wait_for_copy(self, group: Group) -> None:
        """Makes the computing stream wait for the copy of a group's weights, if one was begun."""
        if group in self._copies:
            self.streams.current_stream(self.device).wait_event(self._copies.pop(group))

    def begin_forward(self) -> None:
        """To be called when a forward pass of the whole model begins."""
        self.order = []
        self._copies.clear()

    def end_forward(self) -> None:
        """To be called when a forward pass of the whole model ends."""
        self.last_order = self.order

    def before_forward(self, group: Group) -> tuple[list[Group], int]:
        """To be called before a group's forward pass. Returns the pass's groups so far, and its place there."""
        place = len(self.order)
        self.order.append(group)
        self.begin_copy(group)
        self.wait_for_copy(group)
        is_as_in_last_pass = self.last_order[place : place + 1] == [group]
        if is_as_in_last_pass and place + 1 < len(self.last_order):
            self.begin_copy(self.last_order[place + 1])
        return self.order, place

    def before_backward(self, order: list[Group], place: int) -> None:
        """To be called before a group's backward pass, with what :meth:`before_forward` has returned."""
        group = order[place]
        if group.in_backward:
            self.begin_copy(group)
            self.wait_for_copy(group)
        if place and order[place - 1].in_backward:
            self.begin_copy(order[place - 1])
