"""Takes Muon's step of DTensors: every rank updates its shards' momentum, and one rank orthogonalizes a whole matrix.

The shards of a bucket of matrices go to the matrices' owners in one all-to-all, and the results go back in another.
While one bucket is orthogonalized, the next one is on its way to the owners and the last one on its way back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _ops, reference
from ...reference.shard import ShardArgs
from ...schemas import StepArgs
from ..call import Call
from ..muon_step import orthogonalize_, ratios_of, squares_of
from .blocks import layout_of_shard, reduce_magnitudes
from .calls import local_args, with_copies
from .shards import local, ranks_of

Group = dict[str, Any]  # a parameter group of an optimizer
Loads = dict[Any, list[float]]
"""By mesh and dimension of it: for each rank along the dimension, the work (:func:`_work`) of the matrices it owns."""


def has_whole_matrices(p: Tensor) -> bool:
    """Whether this rank's part of a tensor consists of whole matrices: all of a batch, or some."""
    ranks = ranks_of(p)
    if ranks is None:
        return True
    placements: Any = p.placements  # type: ignore[attr-defined]
    return all(placements[dim].dim < p.dim() - 2 for dim in ranks[1])


def _is_chunked(p: Any) -> bool:
    """Whether the ranks along one dimension of the mesh have the rows or columns of p as torch.chunk cuts them."""
    ranks = ranks_of(p)
    return ranks is not None and len(ranks[1]) == 1 and type(p.placements[ranks[1][0]]).__name__ == "Shard"


def bytes_of_update(p: Tensor) -> int:
    """Bytes that a matrix's update in bf16 takes on a rank, on average."""
    ranks = ranks_of(p)
    if ranks is None or not (has_whole_matrices(p) or _is_chunked(p)):
        return 2 * p.numel()
    mesh, dims = ranks
    return 2 * p.numel() // math.prod(mesh.size(dim) for dim in dims)


def step_buckets(buckets: Sequence[Call], groups: Sequence[Group]) -> None:
    """Steps buckets of matrices, which are the same in the same order on every rank. ``groups``: the optimizer's.

    A bucket begins in each turn of the loop, and the steps of the buckets before go on to their next phase.
    """
    loads: Loads = {}
    waiting = [_phases(bucket, [groups[number] for number in bucket.args.group], loads) for bucket in buckets]
    running: list[Iterator[None]] = []
    while waiting or running:
        # The newest first: what it sends is under way while an older one is orthogonalized.
        running = [*waiting[:1], *running]
        del waiting[:1]
        running = [phases for phases in running if next(phases, "ended") is None]  # a phase that is not the last: None


def _device_of(p: Any, device: torch.device | None) -> torch.device | str:
    """The device that exchanges and orthogonalizes a matrix, if none is given: for shards on the host their mesh's."""
    if device is not None:
        return device
    is_offloaded = ranks_of(p) is not None and p.device_mesh.device_type != p.device.type
    return p.device_mesh.device_type if is_offloaded else p.device


def _phases(bucket: Call, groups: Sequence[Group], loads: Loads) -> Iterator[None]:
    """The step of one bucket. It yields when updates are on their way to the owners, and on their way back."""
    args, params = bucket.args, bucket.args.params
    own, layouts = local_args(args), []
    if bucket.cut:
        layouts = [layout_of_shard(p, args.block_size[group], 1) for p, group in zip(params, args.group, strict=True)]
        scales = [scale.view(layout.scale_shape) for scale, layout in zip(own.scales, layouts, strict=True)]
        own = ShardArgs.of(own._replace(scales=scales), layouts)
    # Zeros, as a step that is skipped writes no updates, and would send what was in memory.
    updates = [torch.zeros_like(p, dtype=torch.bfloat16, requires_grad=False) for p in own.params]
    squares = _update_momentum(own, updates, bucket.by_reference, params)  # of the updates, summed over each matrix
    devices = bucket.product_devices
    moved = [u.to(_device_of(p, device)) for u, p, device in zip(updates, params, devices, strict=True)]
    exchanges = _make_exchanges(params, moved, loads)
    for exchange in exchanges:
        exchange.send()
    yield

    whole: list[tuple[Tensor, Tensor, Group]] = []  # updates to orthogonalize here, their squares and groups
    gathered: dict[int, Tensor] = {}  # by a matrix's number in the bucket, its update on every rank
    for i, (p, u) in enumerate(zip(params, moved, strict=True)):
        if has_whole_matrices(p):
            whole.append((u, squares[i].to(u.device), groups[i]))
        elif not _is_chunked(p):
            gathered[i] = _gather(u, p)
            whole.append((gathered[i], squares_of(gathered[i]), groups[i]))
    for exchange in exchanges:
        for i, u in exchange.receive().items():
            whole.append((u, squares_of(u), groups[i]))
    if whole:
        orthogonalize_(*map(list, zip(*whole, strict=True)))
    for exchange in exchanges:
        exchange.send_back()
    yield

    for i, u in gathered.items():
        moved[i].copy_(_shard_of(u, params[i]))
    for exchange in exchanges:
        exchange.receive_back()
    for u, result in zip(updates, moved, strict=True):
        if result is not u:
            u.copy_(result)
    ratios = ratios_of(params, groups)
    if layouts:
        reference.muon_apply_(own, updates, ratios)
    else:
        _ops.muon_apply_(own, updates, ratios, bucket.by_reference)
    torch.autograd.graph.increment_version([*params, *own.params])


# ---- momentum


def _update_momentum(
    own: StepArgs, updates: list[Tensor], by_reference: bool, params: Sequence[Tensor]
) -> list[Tensor]:
    """Writes momentum and updates; returns the updates' sums of squares. First reduces largest values of cut blocks."""
    if not isinstance(own, ShardArgs):
        return _ops.muon_momentum_(own, updates, by_reference)
    magnitudes = [layout.magnitudes for layout in own.layouts]
    for each in magnitudes:
        each.begin_run()
    reference.muon_momentum_(ShardArgs.of(with_copies(own), own.layouts), updates)
    reduce_magnitudes(magnitudes, [*map(ranks_of, params)])
    for each in magnitudes:
        each.begin_run()
    return reference.muon_momentum_(own, updates)


# ---- whole matrices


def _gather(u: Tensor, p: Any) -> Tensor:
    """On every rank, the whole update of p, which is sharded along several dimensions of a mesh."""
    from torch.distributed.tensor import DTensor

    sharded = DTensor.from_local(u, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
    return sharded.full_tensor().contiguous()


def _shard_of(x: Tensor, p: Any) -> Tensor:
    """This rank's shard of a whole tensor, with the placements of p."""
    from torch.distributed.tensor import distribute_tensor

    return local(distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None))


class _Item(NamedTuple):
    """A matrix of an exchange."""

    number: int  # in the bucket
    owner: int  # the rank, in the process group, that orthogonalizes it
    dim: int  # the dimension that is sharded
    shape: torch.Size  # of the whole matrix
    sizes: list[int]  # of the ranks' shards along ``dim``

    def shape_of(self, rank: int) -> list[int]:
        """The shape of a rank's shard."""
        return [*self.shape[: self.dim], self.sizes[rank], *self.shape[self.dim + 1 :]]

    def numel_of(self, rank: int) -> int:
        """The elements of a rank's shard."""
        return self.shape.numel() // max(1, self.shape[self.dim]) * self.sizes[rank]


def _make_exchanges(params: Sequence[Any], updates: list[Tensor], loads: Loads) -> list[_Exchange]:
    """An exchange for each process group whose ranks have parts of matrices, with an owner for each matrix.

    The largest matrix first, each is given to the rank with the least work so far.
    """
    by_group: dict[Any, list[int]] = {}  # a mesh and a dimension of it make a process group
    for i, p in enumerate(params):
        if not has_whole_matrices(p) and _is_chunked(p):
            mesh, (mesh_dim,) = ranks_of(p)  # type: ignore[misc]
            by_group.setdefault((mesh, mesh_dim), []).append(i)
    exchanges = []
    for (mesh, mesh_dim), numbers in by_group.items():
        world = mesh.size(mesh_dim)
        load = loads.setdefault((mesh, mesh_dim), [0.0] * world)
        owners = {}
        for i in sorted(numbers, key=lambda i: -_work(params[i].shape)):
            owners[i] = load.index(min(load))
            load[owners[i]] += _work(params[i].shape)
        items = []
        for i in numbers:
            shape, dim = params[i].shape, params[i].placements[mesh_dim].dim
            chunk = -(-shape[dim] // world)
            sizes = [max(0, min(chunk, shape[dim] - r * chunk)) for r in range(world)]
            items.append(_Item(i, owners[i], dim, shape, sizes))
        exchanges.append(_Exchange(mesh.get_group(mesh_dim), mesh.get_local_rank(mesh_dim), items, updates))
    return exchanges


def _work(shape: torch.Size) -> float:
    """The multiplications of an iteration of Newton-Schulz, up to a factor."""
    short, long = sorted(shape[-2:])
    return float(shape[:-2].numel() * short * short * (2 * long + short))


class _Exchange:
    """Updates of a bucket on their way to their owners and back, among the ranks of one process group."""

    def __init__(self, group: Any, rank: int, items: list[_Item], updates: list[Tensor]) -> None:
        self.group, self.rank, self.items, self.updates = group, rank, items, updates
        ranks = range(len(items[0].sizes))
        self.owned = [item for item in items if item.owner == rank]
        self.by_owner = [[item for item in items if item.owner == r] for r in ranks]
        # Elements that go to each rank, and that come from each
        self.send_sizes = [sum(item.numel_of(rank) for item in owned) for owned in self.by_owner]
        self.receive_sizes = [sum(item.numel_of(r) for item in self.owned) for r in ranks]
        self.whole: dict[int, Tensor] = {}  # the matrices that this rank owns, by their numbers in the bucket

    def _all_to_all(self, parts: list[Tensor], send_sizes: list[int], receive_sizes: list[int]) -> None:
        """Starts an all-to-all of bf16 elements, as bytes, which all backends take."""
        like = self.updates[self.items[0].number]
        flat = torch.cat([x.reshape(-1) for x in parts]) if parts else like.new_empty(0)
        self.out = like.new_empty(sum(receive_sizes))
        self.work = dist.all_to_all_single(
            self.out.view(torch.uint8), flat.view(torch.uint8), [2 * n for n in receive_sizes],
            [2 * n for n in send_sizes], group=self.group, async_op=True,
        )  # fmt: skip

    def send(self) -> None:
        """Starts to send this rank's shards to the matrices' owners."""
        parts = [self.updates[item.number] for owned in self.by_owner for item in owned]
        self._all_to_all(parts, self.send_sizes, self.receive_sizes)

    def receive(self) -> dict[int, Tensor]:
        """Waits for the matrices that this rank owns; returns them by their numbers in the bucket."""
        self.work.wait()
        parts: dict[int, list[Tensor]] = {item.number: [] for item in self.owned}
        for r, from_rank in enumerate(self.out.split(self.receive_sizes)):
            for item, x in zip(self.owned, from_rank.split([item.numel_of(r) for item in self.owned]), strict=True):
                parts[item.number].append(x.view(item.shape_of(r)))
        self.whole = {item.number: torch.cat(parts[item.number], item.dim) for item in self.owned}
        return self.whole

    def send_back(self) -> None:
        """Starts to send shards of the orthogonalized matrices to their ranks."""
        shards = {item.number: self.whole[item.number].split(item.sizes, item.dim) for item in self.owned}
        parts = [shards[item.number][r] for r in range(len(self.receive_sizes)) for item in self.owned]
        self._all_to_all(parts, self.receive_sizes, self.send_sizes)
        self.whole = {}

    def receive_back(self) -> None:
        """Waits for this rank's shards of all matrices, and writes them into the updates."""
        self.work.wait()
        for owned, from_owner in zip(self.by_owner, self.out.split(self.send_sizes), strict=True):
            for item, x in zip(owned, from_owner.split([item.numel_of(self.rank) for item in owned]), strict=True):
                self.updates[item.number].copy_(x.view(item.shape_of(self.rank)))
