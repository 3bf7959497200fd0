"""Reduces over the ranks of a step: norms, ``found_inf``, sums of squares, largest values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _ops
from .order import Order
from .shards import Ranks, is_dtensor, ranks_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh


def all_reduce(operation: str, values: Sequence[Tensor], ranks: Sequence[Ranks | None]) -> None:
    """Reduces each value, in place, over the ranks that hold other elements of its tensor. ``operation``: "sum", "max".

    One collective for each dimension of a mesh along which a tensor is sharded, for all values together. It runs on the
    mesh's device: the process group need not have a backend for the host, where offloaded shards are.
    """
    by_mesh: dict[DeviceMesh, list[int]] = {}
    for i, owners in enumerate(ranks):
        if owners is not None:
            mesh, _ = owners
            by_mesh.setdefault(mesh, []).append(i)
    for mesh, indices in by_mesh.items():
        if mesh.get_coordinate() is None:
            continue  # this rank has no part of these tensors
        parts = [values[i].reshape(-1).double() for i in indices]
        sizes = [x.numel() for x in parts]
        flat = torch.cat(parts).to(mesh.device_type)
        dims_of_each = [ranks[i][1] for i in indices]  # type: ignore[index]
        for dim in sorted({dim for dims in dims_of_each for dim in dims}):
            if operation == "sum" and mesh.get_local_rank(dim) != 0:
                for x, dims in zip(flat.split(sizes), dims_of_each, strict=True):
                    if dim not in dims:
                        x.zero_()  # all ranks along dim hold this tensor: only the first one's sum is added
            op = dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX
            dist.all_reduce(flat, op, group=mesh.get_group(dim))
        for i, x in zip(indices, flat.split(sizes), strict=True):
            values[i].copy_(x.reshape(values[i].shape))


class AllRanks(NamedTuple):
    """The ranks that have a part of an optimizer's parameters; every rank has an equal one."""

    meshes: tuple[DeviceMesh, ...]
    """Meshes over which reductions, one after the other, bring a value of any rank to all ranks."""
    kinds: tuple[Ranks | None, ...]
    """The results of :func:`ranks_of` for the parameters, each once."""
    order: Order
    """The order of the parameters, in which the ranks exchange their parts."""
    have_matrices: bool = False
    """Whether any rank steps Muon's matrices, so that all ranks skip a step where one of these is not finite."""

    def of(self, params: Sequence[Tensor]) -> AllRanks:
        """The ranks that have a part of some parameters, for a step of these alone."""
        return all_ranks_of(params, (), False)._replace(order=self.order)

    @property
    def have_equal_sums(self) -> bool:
        """Whether sums over the ranks that share a tensor are equal on all: one mesh shards all over all its ranks."""
        if len(self.meshes) != 1 or len(self.kinds) != 1:
            return False
        (mesh,), (kind,) = self.meshes, self.kinds
        all_dims = tuple(dim for dim in range(mesh.ndim) if mesh.size(dim) > 1)
        return not all_dims or kind == (mesh, all_dims)


NO_OTHERS = AllRanks((), (None,), Order())  # where no parameter is a DTensor


def _sort_key(mesh: DeviceMesh) -> Any:
    """The key by which meshes are sorted: the largest first, in an order that is the same on every rank."""
    return -mesh.size(), mesh.mesh_dim_names or (), mesh.mesh.flatten().tolist()


def _sort_key_of_kind(kind: Ranks | None) -> Any:
    mesh, dims = kind or (None, ())
    return () if mesh is None else (*_sort_key(mesh), dims)


def all_ranks_of(params: Sequence[Tensor], groups: Sequence[dict[str, Any]], have_matrices: bool) -> AllRanks:
    """All ranks that have a part of ``params``, of which some are DTensors. ``groups``: the optimizer's.

    The largest mesh is enough where it has all ranks. Otherwise the list of meshes is repeated once per mesh: a value
    may need to cross all of them, in any order.
    """
    meshes = sorted(dict.fromkeys(p.device_mesh for p in params if is_dtensor(p)), key=_sort_key)
    ranks = [set(mesh.mesh.flatten().tolist()) for mesh in meshes]
    meshes = meshes[:1] if all(own <= ranks[0] for own in ranks) else meshes * len(meshes)
    kinds = sorted({*map(ranks_of, params)}, key=_sort_key_of_kind)
    return AllRanks(tuple(meshes), tuple(kinds), Order(groups), have_matrices)


def check_order(order: Order, ranks: set[Ranks]) -> None:
    """Raises RuntimeError on all of these ranks unless all have the same parameters in the same order. Compares once.

    ranks: those that exchange parts of tensors in this step.
    """
    kinds = sorted(ranks - order.checked, key=_sort_key_of_kind)
    if not kinds:
        return
    own = order.fingerprints()
    values = [torch.tensor([own[kind], -own[kind]], dtype=torch.float64, device="cpu") for kind in kinds]
    all_reduce("max", values, kinds)  # gives the highest and, negated, the lowest of all ranks
    if any(highest != -negated_lowest for highest, negated_lowest in map(Tensor.tolist, values)):
        raise RuntimeError(
            "params must be the same in the same order on every rank, as ranks exchange what belongs to their shards "
            f"in that order; another rank has others than this one: {order}. Give named parameters "
            "(model.named_parameters()), which are ordered by their names, or groups in one order"
        )
    order.checked.update(kinds)


def largest(values: Tensor, all_ranks: AllRanks) -> Tensor:
    """The largest of all ranks' values, none of which is NaN.

    Ranks must agree on whether to step, and how far, as they exchange parts of what they step.
    """
    for mesh in all_ranks.meshes:
        if mesh.get_coordinate() is None or mesh.size() == 1:
            continue
        on_mesh = values.to(mesh.device_type, copy=True)
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                dist.all_reduce(on_mesh, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        values = on_mesh.to(values.device)
    return values


def grad_norm(
    grads: Sequence[Tensor],
    grad_scale: Tensor | None,
    device: torch.device,
    ranks: Sequence[Ranks | None],
    all_ranks: AllRanks,
) -> Tensor:
    """The norm of all gradients, fp64, unscaled, the same on all ranks: NaN if any rank's is, else infinite if any is.

    ``grads``: this rank's parts. ``ranks``: for each gradient, the ranks that hold other elements of it.
    """
    squares = _squares(grads, grad_scale, device, ranks, all_ranks.kinds)
    all_reduce("sum", squares, all_ranks.kinds)
    total = torch.stack(squares).sum()
    if all_ranks.have_equal_sums or not all_ranks.meshes:
        return total.sqrt()
    # Gradients of plain tensors and of replicas may differ between ranks, by the reduction that they came from.
    values = torch.stack([total.nan_to_num(nan=0.0, posinf=torch.inf), total.isnan().double()])
    total, has_nan = largest(values, all_ranks).unbind()
    return total.sqrt().where(has_nan == 0, torch.full_like(total, torch.nan))


def is_finite(grads: Sequence[Tensor], device: torch.device, all_ranks: AllRanks) -> Tensor:
    """Whether all gradients of all ranks are finite: a boolean tensor, the same on all ranks."""
    squares = _squares(grads, None, device, [None] * len(grads), [None])
    return largest((~torch.stack(squares).isfinite().all()).float(), all_ranks) == 0


def norm_of(
    grads: Sequence[Tensor], grad_scale: Tensor | None, device: torch.device, out: Tensor | None = None
) -> Tensor:
    """The norm of gradients of one process, fp64 and unscaled, on a device. ``out``: a tensor for it, or None."""
    if any(g.dtype == torch.float64 or g.device != device for g in grads):
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64).to(device) for g in grads]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        return norm if grad_scale is None else norm / grad_scale.to(device).double().reshape(())
    if out is None:
        with torch.inference_mode(False):
            out = torch.zeros((), dtype=torch.float64, device=device)
    if grads:
        _ops.grad_norm_(out, grads, grad_scale)
    return out


def _squares(
    grads: Sequence[Tensor],
    grad_scale: Tensor | None,
    device: torch.device,
    ranks: Sequence[Ranks | None],
    kinds: Sequence[Ranks | None],
) -> list[Tensor]:
    """The sum of the squares of this rank's gradients of each of ``kinds``; 0 where it has none."""
    by_kind: dict[Ranks | None, list[Tensor]] = {kind: [] for kind in kinds}
    for g, kind in zip(grads, ranks, strict=True):
        by_kind[kind].append(g)
    return [norm_of(of_kind, grad_scale, device).square() for of_kind in by_kind.values()]
