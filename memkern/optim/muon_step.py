"""Muon's step of many matrices: its two ops, and the matrix products between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from ..reference.muon import adjusted, orthogonalize
from ..schemas import StepArgs

Group = dict[str, Any]
BUCKET_BYTES = 64 * 2**20
"""Matrices are stepped together up to so many bytes of updates, which are in bf16, or one by one where it has more."""


def buckets(
    numbers: Sequence[int], params: Sequence[Tensor], bytes_of: Callable[[Tensor], int]
) -> Iterator[list[int]]:
    """The numbers of parameters whose step is taken together, in order. ``bytes_of``: of a parameter's update."""
    bucket: list[int] = []
    size = 0
    for i in numbers:
        more = bytes_of(params[i])
        if bucket and size + more > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(i)
        size += more
    if bucket:
        yield bucket


def muon_step(args: StepArgs, by_reference: bool, groups: Sequence[Group]) -> None:
    """The step of matrices on one device. ``groups``: the optimizer's."""
    own_groups = [groups[k] for k in args.group]
    updates = [torch.empty_like(p, dtype=torch.bfloat16, requires_grad=False) for p in args.params]
    sums = _ops.muon_momentum_(args, updates, by_reference)
    orthogonalize_(updates, sums, own_groups)
    _ops.muon_apply_(args, updates, ratios_of(args.params, own_groups), by_reference)


def ratios_of(params: Sequence[Tensor], groups: Sequence[Group]) -> list[float]:
    """What each matrix's learning rate is multiplied by."""
    return [adjusted(g["adjust_lr_fn"], p.shape) for p, g in zip(params, groups, strict=True)]


def on_cpu(x: Tensor) -> bool:
    """Whether matrices are orthogonalized one by one: a matrix's bits are then those of any batch or shard."""
    return x.is_cpu


def orthogonalize_(updates: Sequence[Tensor], sums: Sequence[Tensor], groups: Sequence[Group]) -> None:
    """Each matrix in place. Those of one shape together, but on the CPU, where a matrix's bits are always the same."""
    batches: dict[Any, list[int]] = {}
    for i, (u, group) in enumerate(zip(updates, groups, strict=True)):
        options = tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"]
        batches.setdefault((u.shape, options), []).append(i)
    for (_, options), numbers in batches.items():
        if len(numbers) == 1 or on_cpu(updates[numbers[0]]):
            for i in numbers:
                _orthogonalize_one(updates[i], sums[i], options)
            continue
        found = orthogonalize(
            torch.stack([updates[i] for i in numbers]), torch.stack([sums[i] for i in numbers]), *options
        )
        for i, x in zip(numbers, found.unbind(), strict=True):
            updates[i].copy_(x)


def _orthogonalize_one(u: Tensor, sums: Tensor, options: tuple[Any, ...]) -> None:
    """A matrix, or a batch (stacked experts): as many at a time as BUCKET_BYTES has room for, and one on the CPU."""
    if not u.numel():
        return
    if u.ndim == 2:
        u.copy_(orthogonalize(u, sums, *options))
        return
    if u.ndim > 3 or on_cpu(u):
        for part, own in zip(u, sums, strict=True):
            _orthogonalize_one(part, own, options)
        return
    together = max(1, BUCKET_BYTES // (2 * u[0].numel()))
    for part, own in zip(u.split(together), sums.split(together), strict=True):
        part.copy_(orthogonalize(part, own, *options))
