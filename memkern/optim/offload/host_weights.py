"""Keeps the host's weights of all parameters of a model, and cuts them into the buckets that are stepped together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base import BlockwiseOptimizer
from ..dtensor.order import Order
from ..dtensor.shards import largest_shard
from .transfers import Transfers
from .weight import Options, Weight, frozen_weight_of, host_weight_of, put_in_place

BUCKET_ELEMENTS = 2**22
"""Elements from which on a bucket is full. One call of the inner optimizer steps it while others are copied.

A call takes 0.2 ms beside its kernel: an AdamW step on the CPU takes 13 % longer than without buckets where they have
2^20 elements, and 5 % longer where they have 2^22.
"""


class HostWeights(dict[Tensor, Weight]):
    """A :class:`Weight` for each parameter, in the order of the groups.

    Args:
        optimizer_class, options: of the inner optimizer, which steps the weights.
        host_dtype: the weights' dtype; None for each parameter's own.
    """

    left: dict[Tensor, Weight]
    """The weights of parameters with a state that have left the groups, for the case that they come back."""
    transfers_of: Callable[[torch.device], Transfers]  # set by the optimizer
    buckets: list[list[Weight]]

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        options: Options,
        host_dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.left: dict[Tensor, Weight] = {}
        self.optimizer_class, self.options = optimizer_class, options
        self.host_dtype = host_dtype
        self._transfers: dict[torch.device, Transfers] = {}

    def __getstate__(self) -> dict[str, Any]:
        kept = ("optimizer_class", "options", "host_dtype", "left")
        return {**{key: vars(self)[key] for key in kept}, "_transfers": {}}

    def transfers(self, p: Tensor) -> Transfers:
        """The transfers of a parameter's device."""
        if p.device not in self._transfers:
            self._transfers[p.device] = self.transfers_of(p.device)
        return self._transfers[p.device]

    # ---- weights

    def are_in_states(self, group: Options) -> bool:
        """Whether a group has bf16 weights on the host and errors in its states ("bf16+16"), not fp32 weights."""
        options = {**self.options, **group}
        return (
            issubclass(self.optimizer_class, BlockwiseOptimizer)
            and self.host_dtype == torch.float32
            and {p.dtype for p in group["params"] if p.requires_grad} == {torch.bfloat16}
            and not options.get("master_weights")
            and not options.get("stochastic_rounding")
        )

    def new(self, p: Tensor, group: Options) -> Weight:
        """The weight of a parameter that is in no group yet."""
        if (earlier := self.left.get(p)) is not None:
            return earlier
        if not p.requires_grad and p.grad is None:
            return frozen_weight_of(p)
        options = {**self.options, **group}
        keeps_dtype = options.get("master_weights") or options.get("stochastic_rounding") or p.element_size() >= 4
        dtype = p.dtype if keeps_dtype or self.host_dtype is None else self.host_dtype
        return host_weight_of(p, dtype, self.transfers(p))

    def add(self, weights: Sequence[Weight]) -> None:
        """Adds the weights of parameters that have come to the groups."""
        self.update((w.p, w) for w in weights)
        for w in weights:
            self.left.pop(w.p, None)

    def are_of(self, param_groups: Sequence[Options]) -> bool:
        """Whether the groups have the parameters of these weights, in this order."""
        return [id(p) for group in param_groups for p in group["params"]] == [*map(id, self)]

    def follow_lists(self, param_groups: Sequence[Options]) -> None:
        """Makes weights for parameters that have come to the groups, and puts those of removed ones in ``left``."""
        weights: dict[Tensor, Weight] = {}
        for group in param_groups:
            if not any(p in self for p in group["params"]) and self.are_in_states(group):
                group["master_weights"] = "bf16+16"
            weights |= {p: self[p] if p in self else self.new(p, group) for p in group["params"]}
        self.left |= self
        self.clear()
        self.add([*weights.values()])

    def host_param_of(self, p: Any) -> Any:
        """The host's weight of a parameter that is or was in the groups; any other key as it is."""
        w = self.get(p) or self.left.get(p)
        return p if w is None else w.host_param

    def give_states(self, host_states: Mapping[Any, Any], states: MutableMapping[Any, Any]) -> None:
        """Replaces ``states`` by ``host_states``, whose keys, the host's weights, become the model's parameters."""
        p_of = {w.host_param: w.p for weights in (self.left, self) for w in weights.values()}
        states.clear()
        states.update((p_of.get(key, key), x) for key, x in host_states.items())
        self.left = {p: w for p, w in self.left.items() if states.get(p)}

    def thawed(self) -> set[Tensor]:
        """The parameters that were frozen when they were added, and are no longer."""
        return {w.p for w in self.values() if w.frozen and (w.p.requires_grad or w.p.grad is not None)}

    def thaw(self, p: Tensor, group: Options, inner: Optimizer) -> None:
        """Makes the weight of such a parameter one that is stepped."""
        old = self[p]
        self[p] = new = self.new(p, group)
        put_in_place(inner, old.host_param, new.host_param)

    def follow_memory(self) -> None:
        """Gives weights the memory, shapes and memory formats that their parameters have now."""
        for w in self.values():
            if not w.frozen:
                w.follow(self.transfers(w.p))

    # ---- buckets

    def make_buckets(self, in_one: bool, order: Order) -> None:
        """Cuts the weights, in order, into buckets; with ``in_one`` into a single one."""
        self.buckets = [[]]
        elements = 0
        for w in (w for _, w in order.sorted(self.items()) if not w.frozen):
            size = math.prod(largest_shard(w.p))  # the same on every rank, so that buckets and their reductions are
            is_full = elements >= BUCKET_ELEMENTS or size >= BUCKET_ELEMENTS
            if self.buckets[-1] and not in_one and is_full:
                self.buckets.append([])
                elements = 0
            self.buckets[-1].append(w)
            elements += size

    def wait_for_copies(self, copies: Sequence[tuple[Weight, Any]]) -> None:
        """Makes the devices' current streams wait for copies, given as weights with the events of the copies."""
        for w, event in copies:
            self.transfers(w.p).device_waits(event)
