"""Tells which elements, blocks and states a rank holds of DTensors, and recognizes FSDP1's flat parameters."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...quant.layout import layout_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, DTensor
    from typing_extensions import TypeIs

Ranks = tuple["DeviceMesh", tuple[int, ...]]
"""A mesh, and the dimensions of it along which ranks have different elements of a tensor."""

_cut: Any = WeakIdKeyDictionary()  # as a set: parameters with blocks on several ranks, for the report


def note_cut_blocks(p: Tensor) -> None:
    """Has memkern.report() name a parameter whose shards end inside blocks."""
    _cut[p] = True


def report() -> dict[str, Any]:
    """The part of memkern.report() about jobs of several processes."""
    alone = not (dist.is_available() and dist.is_initialized())
    return {
        "process_group": None if alone else f"{dist.get_backend()}, rank {dist.get_rank()} of {dist.get_world_size()}",
        "shards_end_inside_blocks": [
            f"{str(tuple(p.shape)).replace(' ', '')}: replicated scales, stepped on the reference" for p in _cut
        ],
    }


# ---- what is on which rank


def is_dtensor(x: Any) -> TypeIs[DTensor]:
    if type(x) in (Tensor, torch.nn.Parameter):
        return False
    module = sys.modules.get("torch.distributed.tensor")  # no DTensor exists before somebody has imported it
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """The elements that this rank has."""
    if not is_dtensor(x):
        return x
    return _completed(x._local_tensor)  # to_local() would make a view of a parameter at each step


def locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """:func:`local` of each, in a third of the time: a step has six tensors for each parameter."""
    from torch.distributed.tensor import DTensor

    own = [x._local_tensor if isinstance(x, DTensor) else x for x in tensors]
    return [x if type(x) is Tensor else _completed(x) for x in own]


def _completed(x: Any) -> Tensor:
    """A tensor itself; for the result of a collective that may still run, waits for it."""
    return x.wait() if hasattr(x, "wait") else x


def ranks_of(p: Tensor) -> Ranks | None:
    """The ranks that have other elements of a tensor; None where this rank has all."""
    if not is_dtensor(p):
        return None
    mesh = p.device_mesh
    dims = [i for i, placement in enumerate(p.placements) if not placement.is_replicate() and mesh.size(i) > 1]
    return (mesh, tuple(dims)) if dims else None


def is_elsewhere(p: Tensor) -> bool:
    """Whether p is on a mesh without this rank."""
    return is_dtensor(p) and p.device_mesh.get_coordinate() is None


def ranks_of_each(params: Sequence[Tensor]) -> dict[Tensor, Ranks]:
    """:func:`ranks_of` the parameters that are on several; equal ranks are one object."""
    first_equal: dict[Ranks, Ranks] = {}
    return {p: first_equal.setdefault(ranks, ranks) for p in params if (ranks := ranks_of(p))}


def cuts_blocks(p: Tensor, block_size: int) -> bool:
    """Whether a shard of p may end inside a block of the whole tensor. The same on every rank."""
    if not is_dtensor(p) or p.numel() == 0 or (ranks := ranks_of(p)) is None:
        return False
    layout, (mesh, dims) = layout_of(p, block_size), ranks
    placements: Any = p.placements
    short_rows = len(layout.scale_shape) == 1
    shard_counts: dict[int, int] = {}  # by dimension of p
    for mesh_dim in dims:
        placement = placements[mesh_dim]
        dim = placement.dim
        shard_counts[dim] = shard_counts.get(dim, 1) * mesh.size(mesh_dim)
        cuts_columns = dim == 1 and type(placement).__name__ == "Shard"  # and no _StridedShard
        if dim != 0 and (short_rows or not cuts_columns):
            return True
    row_numel = p.numel() // p.shape[0] if p.dim() else 1
    if short_rows:
        nested = [placements[mesh_dim].dim for mesh_dim in dims].count(0) > 1  # shards of shards of the rows
        return nested or -(-p.shape[0] // shard_counts[0]) * row_numel % layout.block != 0
    parts = shard_counts.get(1, 1)  # of each row
    return parts > 1 and (p.shape[1] % parts != 0 or row_numel // parts % layout.block != 0)


def check_placements(p: Tensor) -> None:
    """Raises ValueError for a DTensor that is partial, or sharded and not contiguous."""
    if not is_dtensor(p):
        return
    if any(placement.is_partial() for placement in p.placements):
        raise ValueError(f"params must be sharded or replicated, got placements {p.placements}")
    if ranks_of(p) and not (p.is_contiguous() and local(p).is_contiguous()):
        raise ValueError(
            f"sharded params must be contiguous, got shape {tuple(p.shape)} with strides {p.stride()} and local "
            f"strides {local(p).stride()}; call .contiguous() before they are sharded"
        )


def largest_shard(p: Tensor) -> tuple[int, ...]:
    """The shape of the largest shard of p. The same on every rank."""
    shape = [*p.shape]
    if (ranks := ranks_of(p)) is not None:
        mesh, dims = ranks
        placements: Any = p.placements  # type: ignore[attr-defined]
        for mesh_dim in dims:
            dim = placements[mesh_dim].dim
            shape[dim] = -(-shape[dim] // mesh.size(mesh_dim))
    return tuple(shape)


def is_flat_shard(p: Tensor) -> bool:
    """Whether FSDP1 made p: a flat parameter, or with use_orig_params=True this rank's part of a parameter."""
    return getattr(p, "_fsdp_flattened", False)


def check_whole(name: str, p: Tensor) -> None:
    """Raises ValueError where FSDP1 has made p, which is meant for Muon, a flat shard. ``name``: p, for the error."""
    if is_flat_shard(p):
        raise ValueError(
            f"{name} is a flat shard of FullyShardedDataParallel ({p.numel()} elements), which is no matrix for Muon; "
            "shard the model with torch.distributed.fsdp.fully_shard"
        )


def check_flat_shard(p: Tensor, needs_norms: str | None) -> None:
    """Raises RuntimeError for a flat shard of FSDP1 where ``needs_norms`` names an option or class that needs norms."""
    alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    if needs_norms is None or not is_flat_shard(p) or (alone and needs_norms == "max_grad_norm"):
        return
    raise RuntimeError(
        f"{needs_norms} needs norms of whole tensors, and FullyShardedDataParallel leaves this rank a flat shard of "
        f"them ({p.numel()} elements) that names neither the tensors nor the process group; shard the model with "
        "torch.distributed.fsdp.fully_shard"
        + (", or clip with the model's own clip_grad_norm_" if needs_norms == "max_grad_norm" else "")
    )


def needs_reference(p: Tensor, group: dict[str, Any], coded: bool) -> bool:
    """Whether a shard may have parts of blocks or of layers, which no kernel can step. coded: its state has codes."""
    if ranks_of(p) is None:
        return False
    return (coded and cuts_blocks(p, group["block_size"])) or group.get("layers", 1) != 1


# ---- states


def _placements_of_scales(p: DTensor, block_size: int) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    if cuts_blocks(p, block_size):
        return [Replicate()] * len(p.placements)
    for_columns = Shard(1) if len(layout_of(p, block_size).scale_shape) == 2 else Replicate()
    placements: Any = p.placements
    return [x if x.is_replicate() or x.dim == 0 else for_columns for x in placements]


def on_mesh(own: Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]) -> Tensor:
    """A DTensor of a rank's own part, which stays on its device, as parameters that fully_shard offloads do.

    ``DTensor.from_local`` and ``distribute_tensor`` would copy it to the mesh's device.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    stride = torch.empty(tuple(shape), device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, own.dtype)
    return DTensor(own, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


def _shape_of_scales(p: Tensor, block_size: int) -> tuple[int, ...]:
    """The shape of this rank's scales of p."""
    shape, own = layout_of(p, block_size).scale_shape, local(p).shape  # of p's scales; of this rank's elements
    if cuts_blocks(p, block_size) or not ranks_of(p):
        return shape
    row_numel = math.prod(own[1:])
    if len(shape) == 2:
        return own[0], -(-row_numel // block_size)
    return (-(-own[0] // (block_size // max(1, row_numel))),)


def new_scale(p: Tensor, like: Tensor, block_size: int) -> Tensor:
    """Zero scales for a moment of p; ``like`` is p, or has its shape and the memory format of the moment."""
    if not is_dtensor(p):
        return torch.zeros(layout_of(like, block_size).scale_shape, dtype=torch.float32, device=p.device)
    own = torch.zeros(_shape_of_scales(p, block_size), dtype=torch.float32, device=local(p).device)
    return on_mesh(own, p.device_mesh, _placements_of_scales(p, block_size), layout_of(p, block_size).scale_shape)


def placed(key: str, x: Tensor, p: Tensor, block_size: int) -> Tensor:
    """An entry of a loaded state, with the mesh and the placements that p's state has for the key."""
    if not is_dtensor(p) or key in ("step", "trust_ratio"):  # entries that are no DTensors
        return whole(x)
    is_scale = key.endswith("_scale")
    shape = layout_of(p, block_size).scale_shape if is_scale else p.shape
    if tuple(x.shape) != tuple(shape):
        return x  # for which the caller has an error
    placements = tuple(_placements_of_scales(p, block_size)) if is_scale else p.placements
    if is_dtensor(x) and x.device_mesh == p.device_mesh:
        if x.placements == placements:
            return x
        if x.dtype != torch.int16:
            return x.redistribute(placements=placements)
    return sharded(whole(x).detach(), p, placements)


def whole(x: Tensor) -> Tensor:
    """All elements of a tensor, of which this rank may have a part; all ranks that have one must call it."""
    if not is_dtensor(x):
        return x
    if x.dtype == torch.int16:  # which neither gloo nor NCCL sends
        return whole(x.int()).short()
    return x.full_tensor()


def sharded(x: Tensor, p: DTensor, placements: Sequence[Any] | None = None) -> Tensor:
    """A copy of a whole tensor as a DTensor on p's mesh and device, with p's placements or the given ones."""
    from torch.distributed.tensor import distribute_tensor

    placements = tuple(placements or p.placements)
    if p.device_mesh.size() == 1:
        return on_mesh(x.to(p.device, copy=True), p.device_mesh, placements, x.shape)
    return distribute_tensor(x, p.device_mesh, placements, src_data_rank=None).to(p.device)
