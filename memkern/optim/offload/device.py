"""HostOffload(step_on="device"): optimizer states in host memory, copied to the device for its step, and back."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...schemas import StepArgs, StepOp
from .. import replaced
from ..backward import without_hooks
from ..base import BlockwiseOptimizer
from ..dtensor.shards import is_dtensor, largest_shard, local, on_mesh, ranks_of
from ..muon_step import buckets
from ..state import SIGNED, State, own_entries, state_args
from .pinned import Slabs
from .transfers import Transfers, transfers_of

BUCKET_BYTES = 64 * 2**20
"""States are copied together up to so many bytes, 1.2 ms at 55 GB/s, and those of a parameter that has more by rows."""
LARGE_BYTES = 4 * BUCKET_BYTES
"""Buckets of more bytes, whose states are not stepped by rows, all take the first of the two buffers."""
Places = dict[int, dict[str, tuple[int, Tensor]]]
"""The entries of states, by the states' ids: each entry's offset in bytes, and a tensor of its dtype and shape."""
ALIGNMENT = 128  # bytes; kernels read 16 at a time


class Slot:
    """A buffer on the device, for the states of one bucket at a time."""

    memory: Tensor
    free: Any  # the event after which it may be written
    holder: Bucket | None = None

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._allocate(0)

    def _allocate(self, size: int) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device=self.stage.device)
        self.free, self.holder = self.stage.transfers.now(), None

    def reserve(self, size: int) -> None:
        """Makes the buffer as large as ``size`` bytes, if it is not."""
        if self.memory.numel() < size:
            self._allocate(size)


class Region:
    """States in one piece of the host's memory, which come to the device in one bucket or, of many bytes, in several.

    ``optimizer.state`` has views of it.
    """

    saved: Any = None  # the event after which the step counters of the last step are in it

    def __init__(self, stage: Stage, states: Sequence[State]) -> None:
        self.stage = stage
        self.size = sum(map(bytes_of, states))
        self.host = stage.slabs.take(self.size)
        self.places: Places = {}
        self.buckets: list[Bucket] = []
        offset = 0
        for state in states:
            places = self.places[id(state)] = {}
            for key, x in own_entries(state).items():
                view = _view(self.host, offset, x, by_itself=True)
                local(view).copy_(local(x))
                places[key], state[key] = (offset, view), view
                offset += _aligned(local(x).nbytes)
            state.region = self

    def has(self, state: State) -> bool:
        """Whether a state's entries are in the region. Values of ones that were replaced by others alike are taken."""
        places, entries = self.places.get(id(state), {}), own_entries(state)
        if state.region is not self or {*places} != {*entries}:
            return False
        others = {key: x for key, x in entries.items() if x is not places[key][1]}
        if any(
            type(x) is not type(own := places[key][1])
            or (x.dtype, x.shape, x.stride()) != (own.dtype, own.shape, own.stride())
            for key, x in others.items()
        ):
            return False
        for key, x in others.items():
            state[key] = places[key][1].copy_(x)
        return True


class Bucket:
    """The states that are copied to the device together: a region's, or rows of the only state in one."""

    came: Any = None  # the event of the last copy to the device
    saved: Any = None  # the event of the last copy back

    def __init__(self, region: Region, slot: Slot, rows: slice | None = None, per_block: int = 1) -> None:
        """per_block: the rows that have a scale together."""
        self.region, self.slot, self.rows = region, slot, rows
        self.places, self.size, self.is_last = region.places, region.size, True
        self.copies = self.copies_back = [(region.host, 0)]  # memory of the host, and where it comes to
        if rows is not None:
            self._take(rows, slice(rows.start // per_block, -(-rows.stop // per_block)))
        self._views: dict[int, dict[str, Tensor]] = {}
        self._views_of: Tensor | None = None
        slot.reserve(self.size)
        region.buckets.append(self)

    def _take(self, rows: slice, scales: slice) -> None:
        """Takes these rows of all entries, and their scales."""
        [(number, entries)] = self.region.places.items()
        self.is_last = rows.stop == max(len(x) for _, x in entries.values() if x.dim())
        self.places, self.size, self.copies, self.copies_back = {number: {}}, 0, [], []
        for key, (_, x) in entries.items():
            part = x if key == "step" else x[scales if key.endswith("_scale") else rows]
            self.places[number][key] = self.size, part
            self.copies.append((part.view(-1).view(torch.uint8), self.size))
            if key != "step" or self.is_last:  # each bucket counts the step from the same number
                self.copies_back.append(self.copies[-1])
            self.size += _aligned(part.nbytes)

    def views(self) -> dict[int, dict[str, Tensor]]:
        """The states on the device, while they are there."""
        memory = self.slot.memory
        if self._views_of is not memory:
            self._views_of = memory
            self._views = {
                number: {key: _view(memory, offset, x) for key, (offset, x) in places.items()}
                for number, places in self.places.items()
            }
        return self._views

    def bring(self) -> None:
        """Begins the copy to the device, unless it is there."""
        if self.slot.holder is not self:
            after = {self.slot.free, self.saved, self.region.saved} - {None}
            for host, offset in self.copies:
                memory = self.slot.memory[offset : offset + host.nbytes]
                self.came = self.region.stage.transfers.to_device(memory, host, *after)
            self.slot.holder = self

    @contextlib.contextmanager
    def brought(self) -> Iterator[None]:
        """The scope in which the states are on the device."""
        transfers, slot = self.region.stage.transfers, self.slot
        self.bring()
        transfers.device_waits(self.came)
        try:
            yield
        except BaseException:
            slot.holder = None
            raise
        for host, offset in self.copies_back:
            self.saved = slot.free = transfers.to_host(host, slot.memory[offset : offset + host.nbytes])
        if self.is_last:
            self.region.saved = self.saved
        self.region.stage.stepped(self)


class Staged:
    """The states of a call: some of a bucket's, or all."""

    def __init__(self, bucket: Bucket, op: StepOp, states: Sequence[State]) -> None:
        self.bucket, self.op, self.numbers = bucket, op, [*map(id, states)]
        self._tensors: dict[str, Any] = {}
        self._views: Any = None

    def args(self, args: StepArgs) -> StepArgs:
        """The op's arguments on the device, of the bucket's rows."""
        if (views := self.bucket.views()) is not self._views:
            self._views, self._tensors = views, state_args(self.op, [views[number] for number in self.numbers])
        args = args._replace(**self._tensors)
        if (rows := self.bucket.rows) is None:
            return args
        return args._replace(params=[p[rows] for p in args.params], grads=[g[rows] for g in args.grads])


class Stage:
    """Copies states to a device and back: by two buffers, and a stream of copies in each direction.

    While one bucket is stepped, the last one goes back and the next one comes: the one that came next in the last pass,
    which is the last step, or of a step in the backward pass the last backward pass. Nothing waits on the host.
    """

    def __init__(self, device: torch.device, transfers: Transfers) -> None:
        self.device, self.transfers = device, transfers
        self.slabs = Slabs(allocate=transfers.host_memory)
        self.slots = Slot(self), Slot(self)
        self._count = 0
        self._next: dict[Bucket, Bucket] = {}  # what followed each, in the last pass
        self._next_now: dict[Bucket, Bucket] = {}  # and in this one
        self._last: Bucket | None = None
        self._saved: Any = None

    # ---- buckets

    @torch.no_grad()
    @torch.inference_mode(False)
    def cut(
        self, parts: Sequence[Sequence[int]], states: Sequence[State], whole: bool, by_rows: bool
    ) -> list[list[int]]:
        """The parts of a step, cut so that the states of each are in one region; ones that are in none get new ones.

        Args:
            parts: numbers of states.
            whole: whether a part whose states are in no region gets one, and not one for each ``BUCKET_BYTES``.
            by_rows: whether the op can step some rows of a parameter by themselves.
        """
        self.wait_for_copies()
        found: list[list[int]] = []
        new: list[list[int]] = []
        for part in parts:
            of_region: dict[Any, list[int]] = {}
            for i in part:
                region = states[i].region
                known = region is not None and region.stage is self and region.has(states[i])
                of_region.setdefault(region if known and (by_rows or len(region.buckets) == 1) else None, []).append(i)
            loose = of_region.pop(None, [])
            fresh = [loose] if whole and loose else [*buckets(loose, states, _bytes_of_largest, BUCKET_BYTES)]
            new += fresh
            found += [*of_region.values(), *fresh]
        self.slabs.plan(sum(bytes_of(states[i]) for i in some) for some in new)
        for some in new:
            region = Region(self, [states[i] for i in some])
            for rows, per_block in _rows_of(states[some[0]]) if by_rows and len(some) == 1 else [(None, 1)]:
                Bucket(region, self._slot_for(region.size if rows is None else BUCKET_BYTES), rows, per_block)
        return found

    def _slot_for(self, size: int) -> Slot:
        """The buffer for a bucket of so many bytes."""
        self._count += size <= LARGE_BYTES
        return self.slots[self._count % 2 if size <= LARGE_BYTES else 0]

    def staged(self, op: StepOp, states: Sequence[State]) -> list[Staged]:
        """The states of a call, which are in one region: of each of its buckets."""
        return [Staged(bucket, op, states) for bucket in states[0].region.buckets]

    # ---- copies

    def begin(self) -> None:
        """A pass begins. What came ahead of time in the last one and was not stepped may have been edited since."""
        for slot in self.slots:
            slot.holder = None
        self._next, self._next_now, self._last = self._next_now or self._next, {}, None

    def stepped(self, bucket: Bucket) -> None:
        """A bucket was stepped, and the copy back was begun."""
        self._saved = bucket.saved
        if self._last is not None:
            self._next_now[self._last] = bucket
        self._last = bucket
        if (following := self._next.get(bucket)) is not None:
            following.bring()

    def wait_for_copies(self) -> None:
        """Waits until the states are on the host."""
        if self._saved is not None:
            self.transfers.host_waits(self._saved)
            self._saved = None


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def bytes_of(state: State) -> int:
    """Bytes of a state in a bucket."""
    return sum(_aligned(local(x).nbytes) for x in own_entries(state).values())


def _rows_of(state: State) -> list[tuple[slice | None, int]]:
    """Rows of a state that come to the device at a time, if not all, and how many have a scale together.

    Blocks begin with a row, and what is random about rounding depends on the place in a block: rows that end where a
    block does are stepped as the whole is.
    """
    format, moment, size = state.format, next(x for key, x in state.items() if key in SIGNED), bytes_of(state)
    if size <= BUCKET_BYTES or is_dtensor(moment) or not moment.is_contiguous() or not moment.dim():
        return [(None, 1)]
    assert format is not None
    per_block = max(1, format.block_size // (moment.numel() // len(moment)))
    at_once = max(1, BUCKET_BYTES * len(moment) // size // per_block) * per_block
    starts = range(0, len(moment), at_once)
    return [(slice(start, min(start + at_once, len(moment))), per_block) for start in starts]


def _bytes_of_largest(state: State) -> int:
    """Bytes of a state's largest shards, so that every rank has the same buckets."""
    return sum(math.prod(largest_shard(x)) * x.element_size() for x in own_entries(state).values())


def _view(memory: Tensor, offset: int, like: Tensor, by_itself: bool = False) -> Tensor:
    """A tensor in these bytes with the dtype, the shape and the memory format of another; a DTensor like one.

    by_itself: it has a storage of its own: torch.save writes whole storages, each of them for one dtype.
    """
    own = local(like)
    stride = torch.empty_like(own, device="meta").stride()
    x = memory[offset : offset + own.nbytes]
    if by_itself and type(x) is Tensor and x.numel() and not x.is_meta:
        x = torch.from_dlpack(x)
    x = x.view(own.dtype).as_strided(own.shape, stride)
    return on_mesh(x, like.device_mesh, like.placements, like.shape) if is_dtensor(like) else x


class StatesOnHost(BlockwiseOptimizer):
    """A block-wise optimizer whose states are on the host, and come to the device for its step.

    Mixed into the optimizer's class by :func:`class_on_host`. ``HostOffload(step_on="device")`` has the documentation.
    """

    _stages: dict[torch.device, Stage | None]
    _is_stepping = False
    _transfers_of: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        self._stages = {}
        super().__init__(*args, **options)

    # ---- states

    @property
    def state(self) -> Any:
        """The states. Whoever reads them between two steps waits until they are on the host."""
        if not self._is_stepping:
            self._wait_for_copies()
        return vars(self)["state"]

    @state.setter
    def state(self, states: Any) -> None:
        vars(self)["state"] = states

    def _wait_for_copies(self) -> None:
        for stage in vars(self).get("_stages", {}).values():
            if stage is not None:
                stage.wait_for_copies()

    def _forget_stages(self) -> None:
        """Lets go of the host's memory that states were in, whose owners they are until the next step moves them."""
        self._wait_for_copies()
        self._stages = {}

    def _stage_of(self, device: torch.device) -> Stage | None:
        if device not in self._stages:
            transfers = self._transfers_of(device)
            self._stages[device] = None if transfers.shares_memory else Stage(device, transfers)
        return self._stages[device]

    def _stand_in(self, p: Tensor, values: bool = False) -> Tensor:
        if self._stage_of(p.device) is None:
            return p
        return p.detach().cpu() if values else torch.empty_like(p.detach(), device="cpu")

    def _convert_storage(self, p: Tensor, group: dict[str, Any]) -> None:
        self._wait_for_copies()
        super()._convert_storage(p, group)

    # ---- steps

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        """The scope in which states are used in the order of the device."""
        before, self._is_stepping = self._is_stepping, True
        try:
            yield
        finally:
            self._is_stepping = before

    def _follow_groups(self) -> None:
        """At the beginning of a step, or of a backward pass that steps."""
        if not replaced.are_same(self._snapshot(), self._snapshots):
            self._forget_stages()
        with self._stepping():
            super()._follow_groups()
        for stage in self._stages.values():
            if stage is not None:
                stage.begin()

    @torch._disable_dynamo
    def step(self, closure: Any = None) -> Any:
        """As the optimizer's own. Returns when copies and steps are queued."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._stepping():
            without_hooks(super().step)()
        return loss

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group["capturable"]:
            raise ValueError(
                "capturable must be False with step_on='device': a step's copies from the host belong to no CUDA graph"
            )

    def _check_shape(self, p: Tensor, group: dict[str, Any]) -> None:
        super()._check_shape(p, group)
        if "algorithm" in group and group["algorithm"] == "muon" and ranks_of(p) is not None:
            raise ValueError(
                f"params of Muon must be whole tensors with step_on='device', got a DTensor of shape {tuple(p.shape)}, "
                f"placements {p.placements}: matrices are exchanged between ranks all at once; use step_on='cpu'"  # type: ignore[attr-defined]
            )

    # ---- copies

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget_stages()
        super().__setstate__(state)


class _ClassOnHost(type):
    """The type of classes that :func:`class_on_host` makes, which are pickled by what they were made of."""

    optimizer_class: Any
    _transfers_of: Any


@functools.cache
def class_on_host(optimizer_class: Any, transfers: Any = transfers_of) -> Any:
    """A block-wise optimizer's class with states on the host. ``transfers``: of a device."""
    attributes = {"optimizer_class": optimizer_class, "_transfers_of": staticmethod(transfers)}
    return _ClassOnHost(f"HostOffload({optimizer_class.__name__})", (StatesOnHost, optimizer_class), attributes)


copyreg.pickle(_ClassOnHost, lambda made: (class_on_host, (made.optimizer_class, made._transfers_of)))
