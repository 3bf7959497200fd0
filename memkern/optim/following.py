"""Groups change between steps: what an optimizer knows of their parameters, and their states, follow them.

Wrappers swap the parameters of an optimizer that exists already (accelerate puts fully_shard's DTensors in place of the
model's), and options and lists are edited by hand. Each step compares what it knows with what is there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import bits, sharding
from .options import check_param
from .storage import ENTRIES

if TYPE_CHECKING:
    from .base import BlockwiseOptimizer

Group = dict[str, Any]
Look = tuple[list[int], list[Any]]
"""A group's parameters, and its options that a step cannot take from one time to the next.

By ``id``: references would keep the parameters that a wrapper has replaced, and weak ones forbid
torch.utils.swap_tensors. A new parameter may have the id of one that is gone, but not of one that has a state.
"""


def looks(optimizer: BlockwiseOptimizer) -> list[Look]:
    keys = (*optimizer.storage_options, "max_grad_norm", "capturable")
    return [([*map(id, g["params"])], [g[key] for key in keys]) for g in optimizer.param_groups]


def storage(optimizer: BlockwiseOptimizer, group: Group) -> Group:
    """The options that say how the group's states are stored."""
    return {key: group[key] for key in optimizer.storage_options}


def follow(optimizer: BlockwiseOptimizer) -> None:
    """Where groups are not as they were: checks them, moves states to new parameters, and converts states.

    Raises:
        ValueError, TypeError, RuntimeError: an option or a parameter that is not supported, or a state that does not
            fit the parameter in its place; before anything is changed.
    """
    found = looks(optimizer)
    if found == optimizer._looks:
        return
    norm = _max_grad_norm(optimizer)
    _check_not_flattened(optimizer, norm)
    for group in optimizer.param_groups:
        group["state_bits"] = bits.of(group)
        optimizer._check_group(group)
        for p in group["params"]:
            check_param(p, group)
            sharding.check_flat_shard(p, optimizer._needs_norms(norm))
    moves = [*_moves(optimizer, [ids for ids, _ in optimizer._looks])]
    moved = [_moved(optimizer, *move) for move in moves]
    for (old, new, _), state in zip(moves, moved, strict=True):
        del optimizer.state[old]
        optimizer._stored[new] = optimizer._stored.pop(old, {})
        if state:
            optimizer.state[new] = state
    optimizer.defaults["max_grad_norm"] = norm
    for group in optimizer.param_groups:
        optimizer._place_lr(group)
        for p in group["params"]:
            optimizer._restore(p, group)
    optimizer._look_at_groups()
    optimizer._looks = looks(optimizer)


def _max_grad_norm(optimizer: BlockwiseOptimizer) -> float | None:
    """The groups' max_grad_norm, which is one for all gradients."""
    norms = [group["max_grad_norm"] for group in optimizer.param_groups]
    if any(norm != norms[0] for norm in norms):
        raise ValueError(
            f"max_grad_norm belongs to the whole optimizer: set it in all groups, got {', '.join(map(str, norms))}"
        )
    return norms[0] if norms else optimizer.defaults["max_grad_norm"]


def _check_not_flattened(optimizer: BlockwiseOptimizer, norm: float | None) -> None:
    """DeepSpeed's ZeRO puts one flat tensor, this rank's part of all, in place of a group's parameters."""
    needed = optimizer._needs_norms(norm)
    if needed is None or "deepspeed" not in sys.modules:
        return
    for group, (ids, _) in zip(optimizer.param_groups, optimizer._looks, strict=False):
        params = group["params"]
        if len(params) == 1 and params[0].dim() == 1 and id(params[0]) not in ids:
            raise RuntimeError(
                f"{needed} needs norms of whole tensors, and DeepSpeed's ZeRO leaves this rank a flat part of them "
                f"({params[0].numel()} elements); shard the model with torch.distributed.fsdp.fully_shard, or "
                + (
                    "clip by DeepSpeed's gradient_clipping"
                    if needed == "max_grad_norm"
                    else "take ZeRO stage 0"
                )
            )


# ---- parameters in place of others


def _moves(
    optimizer: BlockwiseOptimizer, before: Sequence[Sequence[int]]
) -> Iterator[tuple[Tensor, Tensor, Group]]:
    """Parameters that have a state and are in no group any more, those in their places, and their group."""
    groups = optimizer.param_groups
    now = {id(p) for group in groups for p in group["params"]}
    known = {number for ids in before for number in ids}
    stateful = {id(p): p for p, state in optimizer.state.items() if isinstance(p, Tensor) and state}
    fresh = {id(p): p for g in groups for p in g["params"] if id(p) not in known and id(p) not in stateful}
    left = []
    for k, (ids, group) in enumerate(zip(before, groups, strict=False)):
        params = group["params"]
        own = [p for p in params if id(p) in fresh]
        for i, number in enumerate(ids):
            if number not in stateful or number in now:
                continue
            old, new = stateful[number], params[i] if len(params) == len(ids) else None
            if new is not None and id(new) in fresh and new.shape == old.shape:
                del fresh[id(new)]
                yield old, new, group
            elif own:
                raise _no_place(k, i, old)
            else:
                left.append((k, i, old))
    for k, i, old in left:  # removed, unless one like it has come to another group
        if any(p.shape == old.shape for p in fresh.values()):
            raise _no_place(k, i, old)


def _no_place(k: int, i: int, old: Tensor) -> ValueError:
    return ValueError(
        f"params were replaced: group {k} had one of shape {tuple(old.shape)} with a state at {i}, and the one there "
        "now does not take its place. Replace parameters by as many of the same shapes in the same order, or begin "
        "anew with optimizer.state.clear()"
    )


def _moved(optimizer: BlockwiseOptimizer, old: Tensor, new: Tensor, group: Group) -> dict[str, Tensor]:
    """The state of one parameter for the one in its place, on that one's device and ranks."""
    state = optimizer.state[old]
    stored = optimizer._stored.get(old, group)
    if not new.is_meta and any(isinstance(x, Tensor) and x.is_meta for x in state.values()):
        return {}  # a step on meta has made no values
    found = {}
    for key, x in state.items():
        if key not in ENTRIES:  # a wrapper's
            found[key] = x
            continue
        if sharding.is_dtensor(new) and not sharding.is_dtensor(x) and not x.is_contiguous():
            raise ValueError(
                f"the state of a parameter of shape {tuple(new.shape)} has strides {x.stride()}, and sharded params "
                "must be contiguous; call .contiguous() before they are sharded"
            )
        packed = bits.has_4bit_codes(stored) and x.dtype == torch.uint8
        x = x if sharding.is_dtensor(x) else x.to(new.device)
        found[key] = sharding.placed(key, x, new, stored["block_size"], packed).to(new.device)
    return found
