"""Reductions over the ranks of a step: norms, ``found_inf``, sums of squares, largest values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _ops
from ...schemas import StepArgs
from .shards import Ranks, ranks_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh


def all_reduce(kind: str, values: Sequence[Tensor], ranks: Sequence[Ranks | None]) -> None:
    """Reduces each value, in place, over the ranks that hold other elements of the value's tensor.

    One collective for each dimension of a mesh along which a tensor is sharded, for all values together. It runs on the
    mesh's device, whose process group need not know of the host, where offloaded shards are.
    """
    of_mesh: dict[DeviceMesh, list[int]] = {}
    for i, found in enumerate(ranks):
        if found is not None:
            of_mesh.setdefault(found[0], []).append(i)
    for mesh, own in of_mesh.items():
        parts = [values[i].reshape(-1).double() for i in own]
        sizes = [x.numel() for x in parts]
        flat = torch.cat(parts).to(mesh.device_type)
        dims = [ranks[i][1] for i in own]  # type: ignore[index]
        for k in sorted({k for of_one in dims for k in of_one}):
            if kind == "sum" and mesh.get_local_rank(k) != 0:
                for x, of_one in zip(flat.split(sizes), dims, strict=True):
                    if k not in of_one:
                        x.zero_()  # all ranks along k hold this tensor: only the first one's sum is added
            op = dist.ReduceOp.SUM if kind == "sum" else dist.ReduceOp.MAX
            dist.all_reduce(flat, op, group=mesh.get_group(k))
        for i, x in zip(own, flat.split(sizes), strict=True):
            values[i].copy_(x.reshape(values[i].shape))


def reduced_found_inf(found: Tensor, params: Sequence[Tensor]) -> Tensor:
    """The largest of all ranks' ``found_inf`` of a GradScaler: all ranks skip the step, or none does."""
    found = found.clone()
    dims: dict[DeviceMesh, set[int]] = {}
    for p in params:
        if ranks := ranks_of(p):
            dims.setdefault(ranks[0], set()).update(ranks[1])
    for mesh, own in dims.items():
        all_reduce("max", [found], [(mesh, tuple(sorted(own)))])
    return found


def grad_norm(args: StepArgs, ranks: Sequence[Ranks | None]) -> Tensor:
    """The norm of all gradients, fp64 and unscaled. ``ranks``: who holds other elements of each tensor."""
    of_ranks: dict[Ranks | None, list[Tensor]] = {}
    for g, found in zip(args.grads, ranks, strict=True):
        of_ranks.setdefault(found, []).append(g)
    device = args.grads[0].device
    squares = []
    for grads in of_ranks.values():
        norm = torch.zeros((), dtype=torch.float64, device=device)
        if all(g.dtype != torch.float64 and g.device == device for g in grads):
            _ops.grad_norm_(norm, grads, args.grad_scale)
        else:
            norms = [torch.linalg.vector_norm(g, dtype=torch.float64).to(device) for g in grads]
            norm = torch.linalg.vector_norm(torch.stack(norms))
            if args.grad_scale is not None:
                norm = norm / args.grad_scale.to(device).double().reshape(())
        squares.append(norm.square())
    all_reduce("sum", squares, [*of_ranks])
    return torch.stack(squares).sum().sqrt()
