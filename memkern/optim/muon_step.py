"""Muon's step of many matrices: its two ops, and the matrix products between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import _ops
from ..reference.muon import adjusted, orthogonalize
from ..schemas import StepArgs

Group = dict[str, Any]  # a parameter group of an optimizer
T = TypeVar("T")
BUCKET_BYTES = 64 * 2**20
"""Matrices are stepped together up to so many bytes of their updates, in bf16; one with a larger update alone."""


def buckets(
    numbers: Sequence[int], items: Sequence[T], bytes_of: Callable[[T], int], most: int | None = None
) -> Iterator[list[int]]:
    """The numbers of items that are taken together, in order: up to ``most`` bytes, or one that has more.

    most: None, BUCKET_BYTES.
    """
    most = BUCKET_BYTES if most is None else most
    bucket: list[int] = []
    size = 0
    for i in numbers:
        more = bytes_of(items[i])
        if bucket and size + more > most:
            yield bucket
            bucket, size = [], 0
        bucket.append(i)
        size += more
    if bucket:
        yield bucket


def muon_step(
    args: StepArgs, by_reference: bool, groups: Sequence[Group], devices: Sequence[torch.device | None]
) -> None:
    """The step of matrices on one device.

    Args:
        groups: the optimizer's.
        devices: of each matrix's products; None for the matrix's own.
    """
    own_groups = [groups[k] for k in args.group]
    updates = [torch.empty_like(p, dtype=torch.bfloat16, requires_grad=False) for p in args.params]
    sums = _ops.muon_momentum_(args, updates, by_reference)
    there = [u.to(device or u.device) for u, device in zip(updates, devices, strict=True)]
    orthogonalize_(there, [s.to(u.device) for s, u in zip(sums, there, strict=True)], own_groups)
    for u, x in zip(updates, there, strict=True):
        if x is not u:
            u.copy_(x)
    _ops.muon_apply_(args, updates, ratios_of(args.params, own_groups), by_reference)


def ratios_of(params: Sequence[Tensor], groups: Sequence[Group]) -> list[float]:
    """The factors of the matrices' learning rates."""
    return [adjusted(g["adjust_lr_fn"], shapes_of_parts(g, p.shape)[0]) for p, g in zip(params, groups, strict=True)]


# ---- parts of a matrix


def _split_dim(group: Group, shape: Sequence[int]) -> int:
    return 0 if sum(group["split"]) == shape[0] else 1


def shapes_of_parts(group: Group, shape: Sequence[int]) -> list[tuple[int, ...]]:
    """The shapes of the matrices that are orthogonalized: the tensor's own, or its parts' by the group's ``split``."""
    if group["split"] is None:
        return [tuple(shape)]
    rows, columns = shape
    if _split_dim(group, shape) == 0:
        return [(size, columns) for size in group["split"]]
    return [(rows, size) for size in group["split"]]


def check_split(group: Group, shape: Sequence[int]) -> None:
    """Raises ValueError unless a tensor of the shape has the parts that the group's ``split`` says."""
    sizes = group["split"]
    if sizes is None:
        return
    if not isinstance(sizes, (list, tuple)) or not sizes or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ValueError(f"split must be None or sizes above 0, got {sizes!r}")
    if len(shape) != 2 or sum(sizes) not in shape:
        raise ValueError(
            f"split must have sizes that add up to the rows or the columns of each matrix of its group, got {sizes!r} "
            f"for shape {tuple(shape)}"
        )
    ratios = {adjusted(group["adjust_lr_fn"], part) for part in shapes_of_parts(group, shape)}
    if len(ratios) > 1:
        raise ValueError(
            f"split must have parts with the same adjusted learning rate, got {sizes!r} for shape {tuple(shape)} with "
            f"ratios {', '.join(f'{ratio:.4g}' for ratio in sorted(ratios))}"
        )


# ---- orthogonalization


def on_cpu(x: Tensor) -> bool:
    """Whether matrices are orthogonalized one by one, so that its bits do not depend on a batch or shards."""
    return x.is_cpu


def orthogonalize_(updates: Sequence[Tensor], sums: Sequence[Tensor], groups: Sequence[Group]) -> None:
    """Orthogonalizes matrices in place: those of one shape in a batch, on the CPU one by one (:func:`on_cpu`)."""
    if any(group["split"] is not None for group in groups):
        updates, sums, groups = _in_parts(updates, sums, groups)
    batches: dict[Any, list[int]] = {}
    for i, (u, group) in enumerate(zip(updates, groups, strict=True)):
        options = tuple(group["ns_coefficients"]), group["ns_steps"], float(group["eps"])
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


def _in_parts(
    updates: Sequence[Tensor], sums: Sequence[Tensor], groups: Sequence[Group]
) -> tuple[list[Tensor], list[Tensor], list[Group]]:
    """Updates, sums of squares and groups of the parts that groups' ``split`` says; a part's update is a view."""
    found: tuple[list[Tensor], list[Tensor], list[Group]] = ([], [], [])
    for u, squares, group in zip(updates, sums, groups, strict=True):
        parts = [u] if group["split"] is None else [*u.split(group["split"], _split_dim(group, u.shape))]
        found[0].extend(parts)
        found[1].extend([squares] if group["split"] is None else map(squares_of, parts))
        found[2].extend([group] * len(parts))
    return found


def squares_of(u: Tensor) -> Tensor:
    """The sums of squares of matrices in bf16, of shape ``u.shape[:-2]``: the bits of muon_momentum_'s."""
    norms = torch.zeros(u.shape[:-2], dtype=torch.float64, device=u.device)
    matrices = u.flatten(0, -3) if u.dim() > 2 else u[None]
    for norm, matrix in zip(norms.view(-1), matrices, strict=True):
        _ops.grad_norm_(norm, [matrix.contiguous()], None)
    return norms.square()  # the square root of the square of a float64 is the number itself


def _orthogonalize_one(u: Tensor, sums: Tensor, options: tuple[Any, ...]) -> None:
    """A matrix, or a batch (stacked experts): as many at a time as BUCKET_BYTES has room for, and one on the CPU."""
    if not u.numel():
        return
    if u.ndim == 2:
        u.copy_(orthogonalize(u, sums, *options))
        return
    if u.ndim > 3 or on_cpu(u):
        for part, total in zip(u, sums, strict=True):
            _orthogonalize_one(part, total, options)
        return
    together = max(1, BUCKET_BYTES // (2 * u[0].numel()))
    for part, total in zip(u.split(together), sums.split(together), strict=True):
        part.copy_(orthogonalize(part, total, *options))
