"""Muon's step of DTensors: every rank updates the momentum of its shards, and one rank orthogonalizes a whole matrix.

What the owner of a matrix needs comes to it in one all-to-all for a bucket of matrices, and the result goes back in
another. While one bucket is orthogonalized, the next one is on its way to the owners and the last one on its way back.
"""

from __future__ import annotations

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
from .calls import copies, local_args
from .shards import local, ranks_of

Group = dict[str, Any]  # a parameter group of an optimizer
Loads = dict[Any, list[float]]
"""The multiplications of the matrices that each rank of a process group owns."""


def has_whole_matrices(p: Tensor) -> bool:
    """Whether this rank's part of a tensor consists of whole matrices: of all, or of some of a batch."""
    ranks = ranks_of(p)
    if ranks is None:
        return True
    placements: Any = p.placements  # type: ignore[attr-defined]
    return all(placements[k].dim < p.dim() - 2 for k in ranks[1])


def _along_one_dimension(p: Any) -> bool:
    """Whether the ranks along one dimension of the mesh have the rows or columns of p as torch.chunk cuts them."""
    ranks = ranks_of(p)
    return ranks is not None and len(ranks[1]) == 1 and type(p.placements[ranks[1][0]]).__name__ == "Shard"


def bytes_of_update(p: Tensor) -> int:
    """Bytes of a matrix's update in bf16 on a rank, on average."""
    ranks = ranks_of(p)
    if ranks is None or not (has_whole_matrices(p) or _along_one_dimension(p)):
        return 2 * p.numel()
    mesh, dims = ranks
    count = 1
    for k in dims:
        count *= mesh.size(k)
    return 2 * p.numel() // count


def steps(buckets: Sequence[Call], groups: Sequence[Group]) -> None:
    """The steps of buckets of matrices, the same in the same order on every rank. ``groups``: the optimizer's."""
    loads: Loads = {}
    waiting = [_phases(bucket, [groups[k] for k in bucket.args.group], loads) for bucket in buckets]
    running: list[Iterator[None]] = []
    while waiting or running:
        # The newest first: what it sends is under way while an older one is orthogonalized.
        running = [*waiting[:1], *running]
        del waiting[:1]
        running = [phases for phases in running if next(phases, phases) is None]


def _device_of(p: Any, device: torch.device | None) -> torch.device | str:
    """The device that exchanges and orthogonalizes a matrix: for shards that are on the host, their mesh's."""
    if device is not None:
        return device
    away = ranks_of(p) is not None and p.device_mesh.device_type != p.device.type
    return p.device_mesh.device_type if away else p.device


def _phases(bucket: Call, groups: Sequence[Group], loads: Loads) -> Iterator[None]:
    """The step of one bucket, in three parts: up to what is sent to owners, up to what is sent back, and the rest."""
    args, params = bucket.args, bucket.args.params
    own, layouts = local_args(args), []
    if bucket.cut:
        layouts = [layout_of_shard(p, args.block_size[k], 1) for p, k in zip(params, args.group, strict=True)]
        shaped = zip(own.scales, layouts, strict=True)
        own = ShardArgs.of(own._replace(scales=[s.view(x.scale_shape) for s, x in shaped]), layouts)
    # Zeros, so that a step which is skipped sends nothing that was in memory.
    updates = [torch.zeros_like(p, dtype=torch.bfloat16, requires_grad=False) for p in own.params]
    sums = _momentum(own, updates, bucket.by_reference, params)
    devices = bucket.product_devices
    there = [u.to(_device_of(p, device)) for u, p, device in zip(updates, params, devices, strict=True)]
    exchanges = _exchanges(params, there, loads)
    for exchange in exchanges:
        exchange.send()
    yield

    whole: list[tuple[Tensor, Tensor, Group]] = []
    gathered: list[tuple[int, Tensor]] = []
    for i, (p, u) in enumerate(zip(params, there, strict=True)):
        if has_whole_matrices(p):
            whole.append((u, sums[i].to(u.device), groups[i]))
        elif not _along_one_dimension(p):
            gathered.append((i, _gathered(u, p)))
            whole.append((gathered[-1][1], squares_of(gathered[-1][1]), groups[i]))
    for exchange in exchanges:
        for i, u in exchange.received().items():
            whole.append((u, squares_of(u), groups[i]))
    if whole:
        orthogonalize_(*map(list, zip(*whole, strict=True)))
    for exchange in exchanges:
        exchange.send_back()
    yield

    for i, x in gathered:
        there[i].copy_(_shard_of(x, params[i]))
    for exchange in exchanges:
        exchange.receive_back()
    for u, x in zip(updates, there, strict=True):
        if x is not u:
            u.copy_(x)
    ratios = ratios_of(params, groups)
    if layouts:
        reference.muon_apply_(own, updates, ratios)
    else:
        _ops.muon_apply_(own, updates, ratios, bucket.by_reference)
    torch.autograd.graph.increment_version([*params, *own.params])


# ---- momentum


def _momentum(own: StepArgs, updates: list[Tensor], by_reference: bool, params: Sequence[Tensor]) -> list[Tensor]:
    """Updates the momentum; where shards cut blocks, first in copies, for the blocks' largest values on all ranks."""
    if not isinstance(own, ShardArgs):
        return _ops.muon_momentum_(own, updates, by_reference)
    shards = [layout.shard for layout in own.layouts]
    for shard in shards:
        shard.begin()
    reference.muon_momentum_(ShardArgs.of(copies(own), own.layouts), updates)
    reduce_magnitudes(shards, [*map(ranks_of, params)])
    for shard in shards:
        shard.begin()
    return reference.muon_momentum_(own, updates)


# ---- whole matrices


def _gathered(u: Tensor, p: Any) -> Tensor:
    """The whole of what is sharded along several dimensions of a mesh, on every rank."""
    from torch.distributed.tensor import DTensor

    sharded = DTensor.from_local(u, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
    return sharded.full_tensor().contiguous()


def _shard_of(x: Tensor, p: Any) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    return local(distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None))


class _Item(NamedTuple):
    """A matrix of an exchange."""

    number: int  # in the bucket
    owner: int
    dim: int  # that is sharded
    shape: torch.Size  # of the whole
    sizes: list[int]  # of the ranks' shards along ``dim``

    def shape_of(self, rank: int) -> list[int]:
        return [*self.shape[: self.dim], self.sizes[rank], *self.shape[self.dim + 1 :]]

    def numel_of(self, rank: int) -> int:
        return self.shape.numel() // max(1, self.shape[self.dim]) * self.sizes[rank]


def _exchanges(params: Sequence[Any], updates: list[Tensor], loads: Loads) -> list[_Exchange]:
    """One for each process group whose ranks have parts of matrices."""
    of_group: dict[Any, list[int]] = {}
    for i, p in enumerate(params):
        if not has_whole_matrices(p) and _along_one_dimension(p):
            mesh, (k,) = ranks_of(p)  # type: ignore[misc]
            of_group.setdefault((mesh, k), []).append(i)
    found = []
    for (mesh, k), numbers in of_group.items():
        world = mesh.size(k)
        load = loads.setdefault((mesh, k), [0.0] * world)
        owners = {}
        for i in sorted(numbers, key=lambda i: -_work(params[i].shape)):
            owners[i] = load.index(min(load))
            load[owners[i]] += _work(params[i].shape)
        items = []
        for i in numbers:
            dim = params[i].placements[k].dim
            chunk = -(-params[i].shape[dim] // world)
            sizes = [max(0, min(chunk, params[i].shape[dim] - r * chunk)) for r in range(world)]
            items.append(_Item(i, owners[i], dim, params[i].shape, sizes))
        found.append(_Exchange(mesh.get_group(k), mesh.get_local_rank(k), items, updates))
    return found


def _work(shape: torch.Size) -> float:
    """Multiplications of an iteration of Newton-Schulz, up to a factor."""
    short, long = sorted(shape[-2:])
    return float(shape[:-2].numel() * short * short * (2 * long + short))


class _Exchange:
    """Updates of a bucket on their way to their owners and back, among the ranks of one process group."""

    def __init__(self, group: Any, rank: int, items: list[_Item], updates: list[Tensor]) -> None:
        self.group, self.rank, self.items, self.updates = group, rank, items, updates
        ranks = range(len(items[0].sizes))
        self.owned = [item for item in items if item.owner == rank]
        self.of_owner = [[item for item in items if item.owner == r] for r in ranks]
        self.sent = [sum(item.numel_of(rank) for item in own) for own in self.of_owner]
        self.taken = [sum(item.numel_of(r) for item in self.owned) for r in ranks]
        self.whole: dict[int, Tensor] = {}

    def _all_to_all(self, parts: list[Tensor], given: list[int], wanted: list[int]) -> None:
        """Starts it. Bytes, which all backends take."""
        like = self.updates[self.items[0].number]
        flat = torch.cat([x.reshape(-1) for x in parts]) if parts else like.new_empty(0)
        self.out = like.new_empty(sum(wanted))
        self.work = dist.all_to_all_single(
            self.out.view(torch.uint8), flat.view(torch.uint8), [2 * n for n in wanted], [2 * n for n in given],
            group=self.group, async_op=True,
        )  # fmt: skip

    def send(self) -> None:
        parts = [self.updates[item.number] for own in self.of_owner for item in own]
        self._all_to_all(parts, self.sent, self.taken)

    def received(self) -> dict[int, Tensor]:
        """The matrices that this rank owns, by their numbers in the bucket."""
        self.work.wait()
        parts: dict[int, list[Tensor]] = {item.number: [] for item in self.owned}
        for r, of_rank in enumerate(self.out.split(self.taken)):
            for item, x in zip(self.owned, of_rank.split([item.numel_of(r) for item in self.owned]), strict=True):
                parts[item.number].append(x.view(item.shape_of(r)))
        self.whole = {item.number: torch.cat(parts[item.number], item.dim) for item in self.owned}
        return self.whole

    def send_back(self) -> None:
        cut = {item.number: self.whole[item.number].split(item.sizes, item.dim) for item in self.owned}
        parts = [cut[item.number][r] for r in range(len(self.taken)) for item in self.owned]
        self._all_to_all(parts, self.taken, self.sent)
        self.whole = {}

    def receive_back(self) -> None:
        self.work.wait()
        for own, x in zip(self.of_owner, self.out.split(self.sent), strict=True):
            for item, y in zip(own, x.split([item.numel_of(self.rank) for item in own]), strict=True):
                self.updates[item.number].copy_(y.view(item.shape_of(self.rank)))
