"""Finds what has changed in an optimizer's groups since its last step: options, and parameters that replace others.

Wrappers replace the parameters of an optimizer that exists already (accelerate puts fully_shard's DTensors in place of
the model's), and users edit options and lists by hand.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .format import Format
from .state import State

Group = dict[str, Any]  # a parameter group of an optimizer
Snapshot = tuple[list[int], list[Any]]
"""The ids of a group's parameters, and the options whose change needs work before a step.

References would keep replaced parameters alive, and weak references forbid torch.utils.swap_tensors. A new parameter
may have the id of a parameter that was freed, but not of one that has a state, whose state keeps it alive.
"""
Storages = dict[int, Any]
"""By the id of a parameter, a weak reference to its memory, which tells it from a new one with its id."""


def snapshots(groups: Sequence[Group], keys: Sequence[str]) -> list[Snapshot]:
    """A snapshot of each group, with the options ``keys``."""
    return [([*map(id, group["params"])], [group[key] for key in keys]) for group in groups]


def storages_of(groups: Sequence[Group]) -> Storages:
    """The memory of the groups' parameters, but for those that have none (lazy) or other memory (sparse)."""
    params = [p for group in groups for p in group["params"] if isinstance(p, Tensor) and not is_lazy(p)]
    return {id(p): weakref.ref(p.untyped_storage()) for p in params if p.layout == torch.strided}


def are_same(now: Sequence[Snapshot], before: Sequence[Snapshot]) -> bool:
    """Whether nothing has changed. Options are compared by identity: an equal one may be of another type."""
    return len(now) == len(before) and all(
        ids == old_ids and all(map(operator.is_, options, old_options))
        for (ids, options), (old_ids, old_options) in zip(now, before, strict=True)
    )


def max_grad_norm(groups: Sequence[Group], default: float | None) -> float | None:
    """The max_grad_norm of all groups, which must be one; ``default`` where there is no group."""
    norms = [group["max_grad_norm"] for group in groups]
    if any(norm != norms[0] for norm in norms):
        raise ValueError(
            f"max_grad_norm belongs to the whole optimizer: set it in all groups, got {', '.join(map(str, norms))}"
        )
    return norms[0] if norms else default


def check_not_flattened(groups: Sequence[Group], before: Sequence[Snapshot], needed: str | None) -> None:
    """Raises RuntimeError where norms are needed and DeepSpeed's ZeRO has replaced a group's params by a flat tensor.

    ``needed``: the option or the class that needs norms, if any. A rank's flat tensor is its part of all parameters.
    """
    if needed is None or "deepspeed" not in sys.modules:
        return
    for group, (ids, _) in zip(groups, before, strict=False):
        params = group["params"]
        if len(params) == 1 and params[0].dim() == 1 and id(params[0]) not in ids:
            raise RuntimeError(
                f"{needed} needs norms of whole tensors, and DeepSpeed's ZeRO leaves this rank a flat part of them "
                f"({params[0].numel()} elements); shard the model with torch.distributed.fsdp.fully_shard, or "
                + ("clip by DeepSpeed's gradient_clipping" if needed == "max_grad_norm" else "take ZeRO stage 0")
            )


# ---- parameters in place of others


def _moves(
    groups: Sequence[Group], states: Mapping[Any, Any], before: Sequence[Snapshot], storages: Storages
) -> Iterator[tuple[Tensor, Tensor, Group]]:
    """Yields parameters with a state that are in no group any more, what replaces each, and the group."""
    ids_now = {id(p) for group in groups for p in group["params"]}
    ids_before = {old_id for ids, _ in before for old_id in ids}
    stateful = {id(p): p for p, state in states.items() if isinstance(p, Tensor) and state}
    fresh = {id(p): p for g in groups for p in g["params"] if id(p) not in ids_before and id(p) not in stateful}

    def is_new(p: Tensor) -> bool:
        has_old_id = id(p) in storages and id(p) not in stateful and storages[id(p)]() is not p.untyped_storage()
        return id(p) in fresh or has_old_id

    unreplaced: list[tuple[int, int, Tensor]] = []
    for k, ((ids, _), group) in enumerate(zip(before, groups, strict=False)):
        params = group["params"]
        added = [p for p in params if id(p) in fresh]
        for i, old_id in enumerate(ids):
            if old_id not in stateful or old_id in ids_now:
                continue
            old, new = stateful[old_id], params[i] if len(params) == len(ids) else None
            if new is not None and is_new(new) and new.shape == old.shape:
                fresh.pop(id(new), None)
                yield old, new, group
            elif added:
                raise _no_place(k, i, old)
            else:
                unreplaced.append((k, i, old))
    for k, i, old in unreplaced:  # they were removed, unless one of the same shape has come to another group
        if any(p.shape == old.shape for p in fresh.values()):
            raise _no_place(k, i, old)


def moved(
    groups: Sequence[Group],
    states: Mapping[Any, Any],
    before: Sequence[Snapshot],
    storages: Storages,
    stand_in: Callable[[Tensor], Tensor],
) -> list[tuple[Tensor, Tensor, State]]:
    """Parameters with a state that are in no group any more, the ones that replace them, and the states for these.

    stand_in: returns a tensor like a parameter, with the device and the memory format that its state has.

    Raises:
        ValueError: it is not clear which parameter takes the place of one that has a state.
    """
    return [
        (old, new, State.of(states[old], Format.of(group)).moved(stand_in(new)))
        for old, new, group in _moves(groups, states, before, storages)
    ]


def states_of(optimizer: Any) -> dict[Tensor, State]:
    """The states of a block-wise optimizer's parameters as its next step will find them, for reading before it.

    Each has a format, and the state of a replaced parameter is that of the parameter in its place. Raises ValueError as
    :func:`moved` does.
    """
    groups, states = optimizer.param_groups, optimizer.state
    with_state = [(p, group) for group in groups for p in group["params"] if states.get(p)]
    own = {p: State.of(states[p], Format.of(group)) for p, group in with_state}
    moves = moved(groups, states, optimizer._snapshots, optimizer._storages, optimizer._stand_in)
    return own | {new: state for _, new, state in moves}


def _no_place(k: int, i: int, old: Tensor) -> ValueError:
    """The error where it is not clear which parameter has taken the place of ``old``, number i of group k."""
    return ValueError(
        f"params were replaced: group {k} had one of shape {tuple(old.shape)} with a state at {i}, and the one there "
        "now does not take its place. Replace parameters by as many of the same shapes in the same order, or begin "
        "anew with optimizer.state.clear()"
    )
