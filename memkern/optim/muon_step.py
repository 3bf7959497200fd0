"""Takes Muon's step of many matrices: its two element-wise ops, and the orthogonalization between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import _ops
from ..reference.muon import lr_ratio, orthogonalize
from ..schemas import StepArgs

Group = dict[str, Any]  # a parameter group of an optimizer
T = TypeVar("T")
BUCKET_BYTES = 64 * 2**20
"""The most bytes that the bf16 updates of matrices which are stepped together take. A larger one is stepped alone."""


def cut_into_buckets(
    numbers: Sequence[int], items: Sequence[T], bytes_of: Callable[[T], int], max_bytes: int | None = None
) -> Iterator[list[int]]:
    """Cuts items, in order, into buckets of up to ``max_bytes`` (default BUCKET_BYTES), or of one item that has more.

    numbers: indices in ``items`` of those to cut. Yields the indices of each bucket.
    """
    max_bytes = BUCKET_BYTES if max_bytes is None else max_bytes
    bucket: list[int] = []
    size = 0
    for i in numbers:
        item_bytes = bytes_of(items[i])
        if bucket and size + item_bytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(i)
        size += item_bytes
    if bucket:
        yield bucket


def muon_step(
    args: StepArgs, by_reference: bool, groups: Sequence[Group], devices: Sequence[torch.device | None]
) -> None:
    """Steps matrices on one device.

    Args:
        groups: the optimizer's.
        devices: where each matrix is orthogonalized; None for its own device.
    """
    own_groups = [groups[number] for number in args.group]  # of each matrix
    updates = [torch.empty_like(p, dtype=torch.bfloat16, requires_grad=False) for p in args.params]
    squares = _ops.muon_momentum_(args, updates, by_reference)  # of the updates, summed over each matrix
    moved = [u.to(device or u.device) for u, device in zip(updates, devices, strict=True)]
    orthogonalize_(moved, [s.to(u.device) for s, u in zip(squares, moved, strict=True)], own_groups)
    for u, result in zip(updates, moved, strict=True):
        if result is not u:
            u.copy_(result)
    _ops.muon_apply_(args, updates, ratios_of(args.params, own_groups), by_reference)


def ratios_of(params: Sequence[Tensor], groups: Sequence[Group]) -> list[float]:
    """The factors of the matrices' learning rates. Parts of a ``split`` have equal ones (:func:`check_split`)."""
    return [lr_ratio(g["adjust_lr_fn"], shapes_of_parts(g, p.shape)[0]) for p, g in zip(params, groups, strict=True)]


# ---- parts of a matrix


def _split_dim(group: Group, shape: Sequence[int]) -> int:
    """The dimension along which the group's ``split`` cuts a matrix: 0 for rows, 1 for columns."""
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
    ratios = {lr_ratio(group["adjust_lr_fn"], part) for part in shapes_of_parts(group, shape)}
    if len(ratios) > 1:
        raise ValueError(
            f"split must have parts with the same adjusted learning rate, got {sizes!r} for shape {tuple(shape)} with "
            f"ratios {', '.join(f'{ratio:.4g}' for ratio in sorted(ratios))}"
        )


# ---- orthogonalization


def is_one_by_one(x: Tensor) -> bool:
    """Whether matrices are orthogonalized one by one, so that their bits depend on no batch: on the CPU."""
    return x.is_cpu


def orthogonalize_(updates: Sequence[Tensor], squares: Sequence[Tensor], groups: Sequence[Group]) -> None:
    """Orthogonalizes matrices in place: those of one shape in a batch, or one by one (:func:`is_one_by_one`).

    squares: of each update, the sums over its matrices.
    """
    if any(group["split"] is not None for group in groups):
        updates, squares, groups = _in_parts(updates, squares, groups)
    batches: dict[Any, list[int]] = {}
    for i, (u, group) in enumerate(zip(updates, groups, strict=True)):
        options = tuple(group["ns_coefficients"]), group["ns_steps"], float(group["eps"])
        batches.setdefault((u.shape, options), []).append(i)
    for (_, options), numbers in batches.items():
        if len(numbers) == 1 or is_one_by_one(updates[numbers[0]]):
            for i in numbers:
                _orthogonalize_one(updates[i], squares[i], options)
            continue
        batch, batch_squares = (torch.stack([tensors[i] for i in numbers]) for tensors in (updates, squares))
        for i, result in zip(numbers, orthogonalize(batch, batch_squares, *options).unbind(), strict=True):
            updates[i].copy_(result)


def _in_parts(
    updates: Sequence[Tensor], squares: Sequence[Tensor], groups: Sequence[Group]
) -> tuple[list[Tensor], list[Tensor], list[Group]]:
    """Updates, sums of squares and groups of the parts that groups' ``split`` says; a part's update is a view."""
    all_parts, squares_of_parts, groups_of_parts = list[Tensor](), list[Tensor](), list[Group]()
    for u, sums, group in zip(updates, squares, groups, strict=True):
        parts = [u] if group["split"] is None else [*u.split(group["split"], _split_dim(group, u.shape))]
        all_parts += parts
        squares_of_parts += [sums] if group["split"] is None else map(squares_of, parts)
        groups_of_parts += [group] * len(parts)
    return all_parts, squares_of_parts, groups_of_parts


def squares_of(u: Tensor) -> Tensor:
    """The sums of squares of matrices in bf16, of shape ``u.shape[:-2]``, with the bits that muon_momentum_ returns."""
    norms = torch.zeros(u.shape[:-2], dtype=torch.float64, device=u.device)
    matrices = u.flatten(0, -3) if u.dim() > 2 else u[None]
    for norm, matrix in zip(norms.view(-1), matrices, strict=True):
        _ops.grad_norm_(norm, [matrix.contiguous()], None)
    return norms.square()  # a square root gives these norms back exactly


def _orthogonalize_one(u: Tensor, squares: Tensor, options: tuple[Any, ...]) -> None:
    """Orthogonalizes one parameter's matrix, or its batch of them (experts), BUCKET_BYTES at a time or one by one."""
    if not u.numel():
        return
    if u.ndim == 2:
        u.copy_(orthogonalize(u, squares, *options))
        return
    if u.ndim > 3 or is_one_by_one(u):
        for part, part_squares in zip(u, squares, strict=True):
            _orthogonalize_one(part, part_squares, options)
        return
    batch_size = max(1, BUCKET_BYTES // (2 * u[0].numel()))
    for part, part_squares in zip(u.split(batch_size), squares.split(batch_size), strict=True):
        part.copy_(orthogonalize(part, part_squares, *options))
