"""The host's weights of all parameters of a model, and the buckets in which they are stepped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..base import BlockwiseOptimizer
from ..dtensor.order import Order
from .transfers import Transfers
from .weight import Options, Weight, elements_of, frozen_weight_of, host_weight_of, put_in_place

BUCKET_ELEMENTS = 2**22
"""A bucket: tensors of at least so many elements, which one call of the inner optimizer steps while others are copied.

A call costs 0.2 ms beside its kernel: with 2^20 an AdamW step on the CPU takes 13 % longer than without buckets, with
2^22 5 %.
"""


class HostWeights(dict[Tensor, Weight]):
    """A :class:`Weight` for each parameter, in the order of the groups.

    Args:
        optimizer_class, options: what steps the weights.
        host_dtype: of the weights, None for each parameter's own.
    """

    left: dict[Tensor, Weight]
    """Weights of parameters that have left the groups and have a state, with which they may come back."""
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
        """Whether memkern's optimizers shall keep what the group's bf16 parameters lack of fp32 in their states."""
        given = {**self.options, **group}
        return (
            issubclass(self.optimizer_class, BlockwiseOptimizer)
            and self.host_dtype == torch.float32
            and {p.dtype for p in group["params"] if p.requires_grad} == {torch.bfloat16}
            and not given.get("master_weights")
            and not given.get("stochastic_rounding")
        )

    def new(self, p: Tensor, group: Options) -> Weight:
        """The weight of a parameter that is in no group yet."""
        if (known := self.left.get(p)) is not None:
            return known
        if not p.requires_grad and p.grad is None:
            return frozen_weight_of(p)
        given = {**self.options, **group}
        exact = given.get("master_weights") or given.get("stochastic_rounding") or p.element_size() >= 4
        dtype = p.dtype if exact or self.host_dtype is None else self.host_dtype
        return host_weight_of(p, dtype, self.transfers(p))

    def add(self, weights: Sequence[Weight]) -> None:
        """Takes weights of parameters that have come to the groups."""
        self.update((w.p, w) for w in weights)
        for w in weights:
            self.left.pop(w.p, None)

    def are_of(self, param_groups: Sequence[Options]) -> bool:
        """Whether the groups have these parameters, in this order."""
        return [id(p) for group in param_groups for p in group["params"]] == [*map(id, self)]

    def follow_lists(self, param_groups: Sequence[Options]) -> None:
        """Makes weights of parameters that have come to the groups, and puts those of others aside."""
        now: dict[Tensor, Weight] = {}
        for group in param_groups:
            if not any(p in self for p in group["params"]) and self.are_in_states(group):
                group["master_weights"] = "bf16+16"
            now |= {p: self[p] if p in self else self.new(p, group) for p in group["params"]}
        self.left |= self
        self.clear()
        self.add([*now.values()])

    def host_param_of(self, p: Any) -> Any:
        """The host's weight of a parameter that is in the groups or was; anything else as it is."""
        w = self.get(p) or self.left.get(p)
        return p if w is None else w.host_param

    def give_states(self, of_host_params: Mapping[Any, Any], states: MutableMapping[Any, Any]) -> None:
        """Puts states of the host's weights under the model's parameters, in place of all."""
        p_of = {w.host_param: w.p for weights in (self.left, self) for w in weights.values()}
        states.clear()
        states.update((p_of.get(key, key), x) for key, x in of_host_params.items())
        self.left = {p: w for p, w in self.left.items() if states.get(p)}

    def thawed(self) -> set[Tensor]:
        """Parameters that were frozen when they were added, and are not any more."""
        return {w.p for w in self.values() if w.frozen and (w.p.requires_grad or w.p.grad is not None)}

    def thaw(self, p: Tensor, group: Options, inner: Optimizer) -> None:
        old = self[p]
        self[p] = new = self.new(p, group)
        put_in_place(inner, old.host_param, new.host_param)

    def follow_memory(self) -> None:
        """Gives weights the memory, shapes and memory formats that their parameters have now."""
        for w in self.values():
            if not w.frozen:
                w.follow(self.transfers(w.p))

    # ---- buckets

    def make_buckets(self, at_once: bool, order: Order) -> None:
        """Puts neighbours together; ``at_once``: all, for a norm of all gradients."""
        self.buckets = [[]]
        elements = 0
        for w in (w for _, w in order.sorted(self.items()) if not w.frozen):
            last = self.buckets[-1]
            size = elements_of(w.p)  # the same on every rank, as each bucket's reductions must be
            full = elements >= BUCKET_ELEMENTS or size >= BUCKET_ELEMENTS
            if last and not at_once and full:
                self.buckets.append([])
                elements = 0
            self.buckets[-1].append(w)
            elements += size

    def wait_for_copies(self, copies: Sequence[tuple[Weight, Any]]) -> None:
        """Makes the devices' current streams wait for copies of weights, given with their events."""
        for w, event in copies:
            self.transfers(w.p).device_waits(event)
