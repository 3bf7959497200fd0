"""A step in more than one call of the op: several devices, and parameters that no kernel takes as they are.

Parameters with gaps between their elements are copied to a buffer, stepped there and copied back. Everything is checked
before anything is changed, as where one op does it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _ops
from ..quant.layout import is_dense
from ..schemas import StepArgs, StepOp
from . import sharded_step, sharding, weights
from .options import check_gradient, check_param
from .storage import takes_8bit_state

if TYPE_CHECKING:
    from .base import BlockwiseOptimizer


def is_needed(group: dict[str, Any]) -> bool:
    """Whether a group has parameters that one call for all would not take."""
    return bool(group.get("amsgrad")) or any(
        p.dtype == torch.float64
        or not is_dense(p.shape, p.stride())
        or sharding.needs_reference(p, group, takes_8bit_state(p, group))
        for p in group["params"]
    )


def step(optimizer: BlockwiseOptimizer, args: StepArgs) -> None:
    """One step of the parameters in ``args``, which may lack their states."""
    groups = [optimizer.param_groups[number] for number in args.group]
    for p, g, group in zip(args.params, args.grads, groups, strict=True):
        check_param(p, group)
        check_gradient(p, g)
    for p, group in zip(args.params, groups, strict=True):
        optimizer._restore(p, group)
    norms = _grad_norms(optimizer, args)
    calls: dict[Any, tuple[StepOp, list[int]]] = {}  # by device, op and whether kernels can do it
    with_numbers: dict[str, tuple[StepOp, list[int], list[int]]] = {}  # by op: together, and each alone
    strided = []
    for i, (p, group) in enumerate(zip(args.params, groups, strict=True)):
        op = optimizer._op_of(group)
        by_reference = op is not optimizer.op or p.dtype == torch.float64
        coded = any(key.endswith("_scale") for key in optimizer.state[p])
        alone = sharding.needs_reference(p, group, coded)
        if alone or (op.has_trust_ratios and sharding.ranks_of(p) is not None):
            _, together, each = with_numbers.setdefault(op.name, (op, [], []))
            (each if alone or by_reference else together).append(i)
        elif is_dense(p.shape, p.stride()):
            calls.setdefault((p.device, op.name, by_reference), (op, []))[1].append(i)
        else:
            strided.append((i, p, op, by_reference))
    for (device, _, by_reference), (op, own) in calls.items():
        part = _part(optimizer, args, op, own)._replace(grad_norm=norms.get(device))
        _ops.step_(op, sharded_step.local_args(part) if optimizer._sharded else part, by_reference)
    for op, together, each in with_numbers.values():
        parts = [_part(optimizer, args, op, own) for own in (together, *([i] for i in each)) if own]
        parts = [part._replace(grad_norm=norms.get(part.params[0].device)) for part in parts]
        first = parts.pop(0) if together else None
        sharded_step.step_with_numbers(op, first, parts)
    for i, p, op, by_reference in strided:
        part, dense = _part(optimizer, args, op, [i]), _buffer(optimizer, p).copy_(p)
        _ops.step_(op, part._replace(params=[dense], grad_norm=norms.get(p.device)), by_reference)
        p.copy_(dense)


def _part(optimizer: BlockwiseOptimizer, args: StepArgs, op: StepOp, own: list[int]) -> StepArgs:
    """The step of the parameters of these numbers, on one device, with their states."""
    params = [args.params[i] for i in own]
    states = [optimizer.state[p] for p in params]
    lists = {key: [s[key] for s in states if key in s] for key in optimizer._state_keys(op)}
    part = args._replace(
        params=params,
        grads=[args.grads[i] for i in own],
        group=[args.group[i] for i in own],
        weight_states=[s[key] for s in states for key in weights.KEYS if key in s],
        **optimizer._state_args(lists, op),
    )
    return optimizer._scaled(part, params[0].device)


def _buffer(optimizer: BlockwiseOptimizer, p: Tensor) -> Tensor:
    """Room for a parameter without gaps; the same room for every parameter of a device and a dtype."""
    like = torch.empty_like(p, device="meta")
    if torch.compiler.is_compiling():
        return torch.empty_like(p)
    buffers: dict[Any, Tensor] = optimizer.__dict__.setdefault("_buffers", {})
    key = p.device, p.dtype
    if key not in buffers or buffers[key].numel() < p.numel():
        with torch.inference_mode(False):
            buffers[key] = torch.empty(p.numel(), dtype=p.dtype, device=p.device)
    return buffers[key].as_strided(like.shape, like.stride())


def _grad_norms(optimizer: BlockwiseOptimizer, args: StepArgs) -> dict[torch.device, Tensor]:
    """max_grad_norm: the norm of all gradients, fp64, on each device; else nothing."""
    if optimizer.defaults["max_grad_norm"] is None:
        return {}
    grads = args.grads
    first = grads[0].device
    if optimizer._sharded:
        own = sharded_step.local_args(optimizer._scaled(args, first))
        total = sharded_step.grad_norm(own, [*map(sharding.ranks_of, args.params)])
    else:
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64).to(first) for g in grads]
        total = torch.linalg.vector_norm(torch.stack(norms))
        if (scale := getattr(optimizer, "grad_scale", None)) is not None:
            total = total / scale.to(first).double().reshape(())
    return {device: total.to(device) for device in {g.device for g in grads}}
