"""Muon's step of many matrices: its two ops, and the matrix products between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from ..reference.muon import adjusted, orthogonalize
from ..schemas import StepArgs

BUCKET_BYTES = 64 * 2**20
"""Matrices are stepped together up to so many bytes of updates, which are in bf16, or one by one where it has more."""


def buckets(numbers: Sequence[int], params: Sequence[Tensor]) -> Iterator[list[int]]:
    """The numbers of parameters whose step is taken together, in order."""
    bucket: list[int] = []
    size = 0
    for i in numbers:
        more = 2 * params[i].numel()
        if bucket and size + more > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(i)
        size += more
    if bucket:
        yield bucket


def muon_step(args: StepArgs, groups: Sequence[dict[str, Any]], by_reference: bool) -> None:
    """The step of matrices on one device; ``groups``: the group of each."""
    updates = [torch.empty_like(p, dtype=torch.bfloat16, requires_grad=False) for p in args.params]
    sums = _ops.muon_momentum_(args, updates, by_reference)
    batches: dict[Any, list[int]] = {}
    for i, (u, group) in enumerate(zip(updates, groups, strict=True)):
        options = tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"]
        batches.setdefault((u.shape, options), []).append(i)
    for (_, options), numbers in batches.items():
        together = [[i] for i in numbers] if args.params[0].is_cpu else [numbers]
        for some in together:
            _orthogonalize_together(updates, sums, some, options)
    ratios = [adjusted(g["adjust_lr_fn"], p.shape) for p, g in zip(args.params, groups, strict=True)]
    _ops.muon_apply_(args, updates, ratios, by_reference)


def _orthogonalize_together(
    updates: list[Tensor], sums: list[Tensor], numbers: list[int], options: tuple[Any, ...]
) -> None:
    if len(numbers) == 1:
        (i,) = numbers
        _orthogonalize_(updates[i], sums[i], options)
        return
    found = orthogonalize(
        torch.stack([updates[i] for i in numbers]), torch.stack([sums[i] for i in numbers]), *options
    )
    for i, x in zip(numbers, found.unbind(), strict=True):
        updates[i].copy_(x)


def _orthogonalize_(u: Tensor, sums: Tensor, options: tuple[Any, ...]) -> None:
    """In place; of a batch of matrices (stacked experts) as many at a time as BUCKET_BYTES has room for."""
    if 2 * u.numel() <= BUCKET_BYTES or u.ndim == 2 or not u.numel():
        u.copy_(orthogonalize(u, sums, *options))
        return
    if u.ndim > 3:
        for part, own in zip(u, sums, strict=True):
            _orthogonalize_(part, own, options)
        return
    together = max(1, BUCKET_BYTES // (2 * u[0].numel()))
    for part, own in zip(u.split(together), sums.split(together), strict=True):
        part.copy_(orthogonalize(part, own, *options))
