"""Which elements, blocks and states a rank holds of DTensors, and of FSDP1's flat parameters."""

from __future__ import annotations

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
"""A mesh, and those of its dimensions along which ranks have different elements of a tensor."""

_cut: Any = WeakIdKeyDictionary()  # parameters with blocks on several ranks, for the report


def note_cut_blocks(p: Tensor) -> None:
    """Names a parameter in memkern.report(): its shards end inside blocks."""
    _cut[p] = True


def report() -> dict[str, Any]:
    """The part of memkern.report() about several processes."""
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
    module = sys.modules.get("torch.distributed.tensor")  # where nobody has imported it there is no DTensor
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """The elements that this rank has."""
    if not is_dtensor(x):
        return x
    return _completed(x._local_tensor)  # to_local() makes a view of a parameter, at each step


def locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """:func:`local` of each, in a third of the time: a step has six tensors for each parameter."""
    from torch.distributed.tensor import DTensor

    own = [x._local_tensor if isinstance(x, DTensor) else x for x in tensors]
    return [x if type(x) is Tensor else _completed(x) for x in own]


def _completed(x: Any) -> Tensor:
    """Waits for a collective; returns its result."""
    return x.wait() if hasattr(x, "wait") else x


def ranks_of(p: Tensor) -> Ranks | None:
    """The ranks that have other elements of a tensor, or None where this one has all."""
    if not is_dtensor(p):
        return None
    mesh = p.device_mesh
    dims = [k for k, at in enumerate(p.placements) if not at.is_replicate() and mesh.size(k) > 1]
    return (mesh, tuple(dims)) if dims else None


def is_elsewhere(p: Tensor) -> bool:
    """Whether p is on a mesh that this rank is no part of."""
    return is_dtensor(p) and p.device_mesh.get_coordinate() is None


def ranks_of_each(params: Sequence[Tensor]) -> dict[Tensor, Ranks]:
    """:func:`ranks_of` of the parameters that have some, one object for ranks that are equal."""
    equal: dict[Ranks, Ranks] = {}
    return {p: equal.setdefault(ranks, ranks) for p in params if (ranks := ranks_of(p))}


def cuts_blocks(p: Tensor, block_size: int) -> bool:
    """Whether a shard of p may end inside a block of the whole tensor. The same on every rank."""
    if not is_dtensor(p) or p.numel() == 0 or (ranks := ranks_of(p)) is None:
        return False
    layout, (mesh, dims) = layout_of(p, block_size), ranks
    placements: Any = p.placements
    short_rows = len(layout.scale_shape) == 1
    count: dict[int, int] = {}  # of shards, by dimension
    for k in dims:
        at = placements[k]
        count[at.dim] = count.get(at.dim, 1) * mesh.size(k)
        plain = type(at).__name__ == "Shard"
        if at.dim and not (plain and at.dim == 1 and not short_rows):
            return True
    inner = p.numel() // p.shape[0] if p.dim() else 1  # elements of a row
    if short_rows:
        nested = [placements[k].dim for k in dims].count(0) > 1
        return nested or -(-p.shape[0] // count[0]) * inner % layout.block != 0
    columns = count.get(1, 1)
    return columns > 1 and (p.shape[1] % columns != 0 or inner // columns % layout.block != 0)


def check_placements(p: Tensor) -> None:
    """Raises ValueError for a DTensor of which no rank has elements of its own, or not in the order of memory."""
    if not is_dtensor(p):
        return
    if any(at.is_partial() for at in p.placements):
        raise ValueError(f"params must be sharded or replicated, got placements {p.placements}")
    if ranks_of(p) and not (p.is_contiguous() and local(p).is_contiguous()):
        raise ValueError(
            f"sharded params must be contiguous, got shape {tuple(p.shape)} with strides {p.stride()} and local "
            f"strides {local(p).stride()}; call .contiguous() before they are sharded"
        )


def largest_shard(p: Tensor) -> tuple[int, ...]:
    """The shape of the largest shard of p that a rank has. The same on every rank."""
    shape = [*p.shape]
    if (ranks := ranks_of(p)) is not None:
        mesh, dims = ranks
        placements: Any = p.placements  # type: ignore[attr-defined]
        for k in dims:
            shape[placements[k].dim] = -(-shape[placements[k].dim] // mesh.size(k))
    return tuple(shape)


def is_flat_shard(p: Tensor) -> bool:
    """Whether FSDP1 made p: a flat parameter, or what use_orig_params=True leaves of one on this rank."""
    return getattr(p, "_fsdp_flattened", False)


def check_whole(name: str, p: Tensor) -> None:
    """Raises ValueError where Muon is to have p and FSDP1 has made it a flat shard."""
    if is_flat_shard(p):
        raise ValueError(
            f"{name} is a flat shard of FullyShardedDataParallel ({p.numel()} elements), which is no matrix for Muon; "
            "shard the model with torch.distributed.fsdp.fully_shard"
        )


def check_flat_shard(p: Tensor, needs_norms: str | None) -> None:
    """Raises RuntimeError where norms are needed (by the option or class of that name) and FSDP1 hides the tensors."""
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
    """Whether a shard has parts of blocks or of layers, which no kernel knows."""
    if ranks_of(p) is None:
        return False
    return (coded and cuts_blocks(p, group["block_size"])) or group.get("layers", 1) != 1


# ---- states


def _placements_of_scales(p: DTensor, block_size: int) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    if cuts_blocks(p, block_size):
        return [Replicate()] * len(p.placements)
    columns = Shard(1) if len(layout_of(p, block_size).scale_shape) == 2 else Replicate()
    placements: Any = p.placements
    return [at if at.is_replicate() or at.dim == 0 else columns for at in placements]


def _scales_on_mesh(p: Tensor, own: Tensor, shape: tuple[int, ...], block_size: int) -> Tensor:
    """This rank's scales of p as a DTensor; ``shape``: of all scales of p."""
    assert is_dtensor(p)
    return on_mesh(own, p.device_mesh, _placements_of_scales(p, block_size), shape)


def on_mesh(own: Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]) -> Tensor:
    """A DTensor of a rank's own part, which stays where it is, as fully_shard makes those of shards on the host.

    ``DTensor.from_local`` and ``distribute_tensor`` copy it to the mesh's device.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    stride = torch.empty(tuple(shape), device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, own.dtype)
    return DTensor(own, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


def _shape_of_scales(p: Tensor, block_size: int) -> tuple[int, ...]:
    """The shape of the scales that this rank has."""
    shape, own = layout_of(p, block_size).scale_shape, local(p).shape
    if cuts_blocks(p, block_size) or not ranks_of(p):
        return shape
    inner = 1
    for size in own[1:]:
        inner *= size
    if len(shape) == 2:
        return own[0], -(-inner // block_size)
    return (-(-own[0] // (block_size // max(1, inner))),)


def new_scale(p: Tensor, like: Tensor, block_size: int) -> Tensor:
    """Zero scales for the moments of p, which has the blocks of ``like``."""
    if not is_dtensor(p):
        return torch.zeros(layout_of(like, block_size).scale_shape, dtype=torch.float32, device=p.device)
    own = torch.zeros(_shape_of_scales(p, block_size), dtype=torch.float32, device=local(p).device)
    return _scales_on_mesh(p, own, layout_of(p, block_size).scale_shape, block_size)


def placed(key: str, x: Tensor, p: Tensor, block_size: int) -> Tensor:
    """A tensor of a loaded state, with the mesh and the placements that the state of p has."""
    of_elements = key not in ("step", "trust_ratio")
    if not is_dtensor(p) or not of_elements:
        return x.full_tensor() if is_dtensor(x) else x
    scale = key.endswith("_scale")
    shape = layout_of(p, block_size).scale_shape if scale else p.shape
    if tuple(x.shape) != tuple(shape):
        return x  # there is a message for this
    at = tuple(_placements_of_scales(p, block_size)) if scale else p.placements
    if is_dtensor(x) and x.device_mesh == p.device_mesh:
        return x if x.placements == at else x.redistribute(placements=at)
    return sharded((x.full_tensor() if is_dtensor(x) else x).detach(), p, at)


def sharded(whole: Tensor, p: DTensor, placements: Sequence[Any] | None = None) -> Tensor:
    """A whole tensor as a DTensor beside p: on its mesh and its device, with its placements or others. A copy."""
    from torch.distributed.tensor import distribute_tensor

    at = tuple(placements or p.placements)
    if p.device_mesh.size() == 1:
        return on_mesh(whole.to(p.device, copy=True), p.device_mesh, at, whole.shape)
    return distribute_tensor(whole, p.device_mesh, at, src_data_rank=None).to(p.device)
