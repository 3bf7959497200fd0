"""A step in several calls of ops: for several devices, and for parameters that the optimizer's own op does not take.

A parameter with gaps between its elements is copied to a buffer, stepped there and copied back. As in a step of one
call, the caller has checked everything before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _ops
from ..quant.codec import CODECS, POWER4
from ..quant.layout import is_dense
from ..schemas import AMSGRAD_STEP, MUON_STEP, StepArgs, StepOp
from . import step_errors, weights
from .dtensor import collectives, shards
from .dtensor import step as dtensor_step
from .muon_step import buckets, muon_step
from .step_args import scaler_on, state_args
from .storage import state_keys, takes_8bit_state

Group = dict[str, Any]


class Entry(NamedTuple):
    """One parameter of a step."""

    param: Tensor
    group: Group
    state: dict[str, Tensor]
    op: StepOp  # which the group's options ask for


def is_needed(group: Group) -> bool:
    """Whether a group has parameters that one call of the optimizer's op does not take."""
    return (
        bool(group.get("amsgrad"))
        or "algorithm" in group
        or any(
            p.dtype == torch.float64
            or not is_dense(p.shape, p.stride())
            or shards.needs_reference(p, group, takes_8bit_state(p, group))
            for p in group["params"]
        )
    )


def step(
    args: StepArgs,
    entries: Sequence[Entry],
    groups: Sequence[Group],
    max_grad_norm: float | None,
    buffers: dict[Any, Tensor],
    hyperparameters: Callable[[StepOp], list[float]],
) -> None:
    """One step of all parameters in ``args``, whose states, in its order, are those of ``entries``.

    Args:
        args: parameters, gradients and groups' numbers; its states and hyperparameters are not used.
        groups: the optimizer's, for messages.
        max_grad_norm: the optimizer's option.
        buffers: memory for parameters with gaps, kept from one step to the next.
        hyperparameters: those of an op, for all groups.
    """
    sharded = any(shards.is_dtensor(entry.param) for entry in entries)
    norms = _grad_norms(args, max_grad_norm, sharded)
    calls: dict[Any, tuple[StepOp, list[int]]] = {}  # by device, op and whether the reference runs it
    reductions: dict[str, tuple[StepOp, list[int], list[int]]] = {}  # by op: together, and each alone
    strided = []
    for i, (p, group, state, own) in enumerate(entries):
        by_reference = own is AMSGRAD_STEP or p.dtype == torch.float64
        coded = any(key.endswith("_scale") for key in state)
        alone = shards.needs_reference(p, group, coded)
        if alone or (own.has_trust_ratios and shards.ranks_of(p) is not None):
            _, together, each = reductions.setdefault(own.name, (own, [], []))
            (each if alone or by_reference else together).append(i)
        elif is_dense(p.shape, p.stride()):
            calls.setdefault((p.device, own.name, by_reference), (own, []))[1].append(i)
        else:
            strided.append((i, p, own, by_reference))

    def part(own: StepOp, numbers: list[int]) -> StepArgs:
        found = _part(args, entries, own, numbers)
        device = found.params[0].device
        return found._replace(grad_norm=norms.get(device), hyperparameters=hyperparameters(own))

    def run(own: StepOp, found: StepArgs, by_reference: bool, params: Sequence[Tensor] | None = None) -> None:
        taken = dtensor_step.local_args(found) if sharded else found
        taken = taken if params is None else taken._replace(params=params)
        if torch.compiler.is_compiling():
            _call(own, taken, groups, by_reference)
            return
        try:
            _call(own, taken, groups, by_reference)
        except step_errors.OP_ERRORS as error:
            raise step_errors.in_words(error, found, groups) from None

    for (_, _, by_reference), (own, numbers) in calls.items():
        # Muon's updates are another 2 bytes per parameter while its step runs: of some matrices at a time.
        parts = buckets(numbers, [entry.param for entry in entries]) if own is MUON_STEP else [numbers]
        for some in parts:
            run(own, part(own, some), by_reference)
    for own, together, each in reductions.values():
        first = part(own, together) if together else None
        dtensor_step.step_with_reduction(own, first, [part(own, [i]) for i in each])
    for i, p, own, by_reference in strided:
        dense = _buffer(buffers, p).copy_(p)
        run(own, part(own, [i]), by_reference, params=[dense])
        p.copy_(dense)


def _call(op: StepOp, args: StepArgs, groups: Sequence[Group], by_reference: bool) -> None:
    if op is MUON_STEP:
        muon_step(args, [groups[k] for k in args.group], by_reference)
    else:
        _ops.step_(op, args, by_reference)


def _part(args: StepArgs, entries: Sequence[Entry], op: StepOp, own: list[int]) -> StepArgs:
    """The step of the parameters of these numbers, on one device, with their states."""
    params = [entries[i].param for i in own]
    states = [entries[i].state for i in own]
    lists = {key: [s[key] for s in states if key in s] for key in state_keys(op)}
    found = args._replace(
        params=params,
        grads=[args.grads[i] for i in own],
        group=[args.group[i] for i in own],
        weight_states=[s[key] for s in states for key in weights.KEYS if key in s],
        codec=[c if op.has_4bit_codes or c != POWER4 else CODECS["power"] for c in args.codec],
        **state_args(lists, op),
    )
    return scaler_on(found, params[0].device)


def _buffer(buffers: dict[Any, Tensor], p: Tensor) -> Tensor:
    """Memory for a parameter without gaps, which all parameters of its device and dtype share."""
    like = torch.empty_like(p, device="meta")
    if torch.compiler.is_compiling():
        return torch.empty_like(p)
    key = p.device, p.dtype
    if key not in buffers or buffers[key].numel() < p.numel():
        with torch.inference_mode(False):
            buffers[key] = torch.empty(p.numel(), dtype=p.dtype, device=p.device)
    return buffers[key].as_strided(like.shape, like.stride())


def _grad_norms(args: StepArgs, max_grad_norm: float | None, sharded: bool) -> dict[torch.device, Tensor]:
    """max_grad_norm: the norm of all gradients, fp64, on each device; else nothing."""
    if max_grad_norm is None:
        return {}
    grads = args.grads
    first = grads[0].device
    if sharded:
        own = dtensor_step.local_args(scaler_on(args, first))
        total = collectives.grad_norm(own, [*map(shards.ranks_of, args.params)])
    else:
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64).to(first) for g in grads]
        total = torch.linalg.vector_norm(torch.stack(norms))
        if args.grad_scale is not None:
            total = total / args.grad_scale.to(first).double().reshape(())
    return {device: total.to(device) for device in {g.device for g in grads}}
