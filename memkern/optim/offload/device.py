"""HostOffload(step_on="device"): keeps optimizer states in host memory, and copies them to the device for its step."""

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
from ..muon_step import cut_into_buckets
from ..state import SIGNED, State, own_entries, state_args
from .pinned import Slabs
from .transfers import Transfers, transfers_of

BUCKET_BYTES = 64 * 2**20
"""The most bytes of states that are copied together, in 1.2 ms at 55 GB/s. Of a larger state some rows are copied."""
LARGE_BYTES = 4 * BUCKET_BYTES
"""The most bytes of a bucket for which the two buffers take turns. Larger ones, of states that cannot be stepped by
rows, all take the first buffer, so that only one is so large."""
Places = dict[int, dict[str, tuple[int, Tensor]]]
"""By a state's id and an entry's key: the entry's offset in bytes, and a tensor of its dtype and shape."""
ALIGNMENT = 128  # bytes; kernels read 16 at a time


class Slot:
    """A buffer on the device, for the states of one bucket at a time."""

    memory: Tensor
    free: Any  # the event after which the buffer may be written
    holder: Bucket | None = None  # the bucket whose states are in the buffer

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._allocate(0)

    def _allocate(self, size: int) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device=self.stage.device)
        self.free, self.holder = self.stage.transfers.now(), None

    def reserve(self, size: int) -> None:
        """Makes the buffer at least ``size`` bytes large."""
        if self.memory.numel() < size:
            self._allocate(size)


class Region:
    """States in one piece of the host's memory, of which ``optimizer.state`` has views.

    They come to the device in one bucket or, where they take more than ``BUCKET_BYTES``, in several.
    """

    saved: Any = None  # the event after which the host's memory has all of the last step, with the step counters

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
        """Whether a state's entries are in the region. Similar entries that replace its own are copied into it."""
        places, entries = self.places.get(id(state), {}), own_entries(state)
        if state.region is not self or {*places} != {*entries}:
            return False
        replaced_keys = [key for key, x in entries.items() if x is not places[key][1]]
        for key in replaced_keys:
            x, own = entries[key], places[key][1]
            if type(x) is not type(own) or (x.dtype, x.shape, x.stride()) != (own.dtype, own.shape, own.stride()):
                return False
        for key in replaced_keys:
            state[key] = places[key][1].copy_(entries[key])
        return True


class Bucket:
    """The states that are copied to the device together: a region's, or rows of its only state."""

    arrived: Any = None  # the event of the last copy to the device
    saved: Any = None  # the event of the last copy back to the host

    def __init__(self, region: Region, slot: Slot, rows: slice | None = None, per_block: int = 1) -> None:
        """rows: of the region's only state, None for the whole region. per_block: how many rows share a scale."""
        self.region, self.slot, self.rows = region, slot, rows
        self.places, self.size = region.places, region.size
        self.is_last = True  # of the region's buckets
        self.copies = self.copies_back = [(region.host, 0)]  # pieces of host memory, each with its offset in the slot
        if rows is not None:
            self._restrict_to(rows, slice(rows.start // per_block, -(-rows.stop // per_block)))
        self._views: dict[int, dict[str, Tensor]] = {}
        self._views_of: Tensor | None = None
        slot.reserve(self.size)
        region.buckets.append(self)

    def _restrict_to(self, rows: slice, scales: slice) -> None:
        """Restricts the bucket to these rows of the only state's entries, and to these of the scales."""
        [(state_id, entries)] = self.region.places.items()
        self.is_last = rows.stop == max(len(x) for _, x in entries.values() if x.dim())  # the rows of moments
        self.places, self.size, self.copies, self.copies_back = {state_id: {}}, 0, [], []
        for key, (offset, x) in entries.items():
            part = x if key == "step" else x[scales if key.endswith("_scale") else rows]
            self.places[state_id][key] = self.size, part
            start = offset + (part.storage_offset() - x.storage_offset()) * x.element_size()
            # A slice of the region's memory in place of ``part``, which has a storage of its own (_view): torch's
            # allocator of pinned memory waits only for copies of storages that it allocated itself.
            self.copies.append((self.region.host[start : start + part.nbytes], self.size))
            # The step counter is of the whole state. All buckets must read the old count: the last writes it back.
            if key != "step" or self.is_last:
                self.copies_back.append(self.copies[-1])
            self.size += _aligned(part.nbytes)

    def views(self) -> dict[int, dict[str, Tensor]]:
        """By id, the states as tensors in the slot's memory."""
        memory = self.slot.memory
        if self._views_of is not memory:
            self._views_of = memory
            self._views = {
                state_id: {key: _view(memory, offset, x) for key, (offset, x) in places.items()}
                for state_id, places in self.places.items()
            }
        return self._views

    def bring(self) -> None:
        """Begins the copy to the device, unless the slot has the states already."""
        if self.slot.holder is not self:
            after = {self.slot.free, self.saved, self.region.saved} - {None}
            for host, offset in self.copies:
                memory = self.slot.memory[offset : offset + host.nbytes]
                self.arrived = self.region.stage.transfers.to_device(memory, host, *after)
            self.slot.holder = self

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """A ``with`` block in which the states are on the device. At its end the copy back begins."""
        transfers, slot = self.region.stage.transfers, self.slot
        self.bring()
        transfers.device_waits(self.arrived)
        try:
            yield
        except BaseException:
            slot.holder = None
            raise
        for host, offset in self.copies_back:
            self.saved = slot.free = transfers.to_host(host, slot.memory[offset : offset + host.nbytes])
        if self.is_last:
            self.region.saved = self.saved
        self.region.stage.bring_next(self)


class StagedStates:
    """The states of one call of an op, on the device: some or all states of a bucket."""

    def __init__(self, bucket: Bucket, op: StepOp, states: Sequence[State]) -> None:
        self.bucket, self.op, self.state_ids = bucket, op, [*map(id, states)]
        self._tensors: dict[str, Any] = {}
        self._views: Any = None

    def args(self, args: StepArgs) -> StepArgs:
        """The op's arguments with the states on the device, and with the bucket's rows of params and grads."""
        views, rows = self.bucket.views(), self.bucket.rows
        if views is not self._views:
            self._views, self._tensors = views, state_args(self.op, [views[state_id] for state_id in self.state_ids])
        args = args._replace(**self._tensors)
        if rows is None:
            return args
        return args._replace(params=[p[rows] for p in args.params], grads=[g[rows] for g in args.grads])


class Stage:
    """Copies states to a device and back, through two buffers (slots), with a stream of copies for each direction.

    While one bucket is stepped, the one before goes back to the host and the next one comes: the bucket that followed
    in the last pass. A pass is a step, or a backward pass that steps. The host waits for nothing.
    """

    def __init__(self, device: torch.device, transfers: Transfers) -> None:
        self.device, self.transfers = device, transfers
        self.slabs = Slabs(allocate=transfers.host_memory)
        self.slots = Slot(self), Slot(self)
        self._count = 0  # of the buckets that were given a slot in turn
        self._next: dict[Bucket, Bucket] = {}  # the bucket that followed each in the last pass
        self._next_now: dict[Bucket, Bucket] = {}  # the same for the current pass
        self._last: Bucket | None = None  # the bucket that was stepped last in the current pass
        self._saved: Any = None  # the event of the last copy back; None if it was waited for

    # ---- buckets

    @torch.no_grad()
    @torch.inference_mode(False)
    def cut_to_regions(
        self, parts: Sequence[Sequence[int]], states: Sequence[State], whole: bool, by_rows: bool
    ) -> list[list[int]]:
        """Cuts the parts of a step so that the states of each part are in one region; makes regions that are missing.

        Args:
            parts: lists of indices in ``states``.
            whole: whether a part's states that are in no region get one region, and not one for each ``BUCKET_BYTES``.
            by_rows: whether the op can step some rows of a parameter by themselves.
        """
        self.wait_for_copies()
        result: list[list[int]] = []
        new_parts: list[list[int]] = []
        for part in parts:
            by_region: dict[Any, list[int]] = {}  # key None: states that need a new region
            for i in part:
                region = states[i].region
                is_in_region = region is not None and region.stage is self and region.has(states[i])
                # Several buckets have rows each. An op that cannot step some rows by themselves needs another region.
                is_kept = is_in_region and (by_rows or len(region.buckets) == 1)
                by_region.setdefault(region if is_kept else None, []).append(i)
            unplaced = by_region.pop(None, [])
            cut = cut_into_buckets(unplaced, states, _bytes_of_largest, BUCKET_BYTES)
            added = [unplaced] if whole and unplaced else [*cut]
            new_parts += added
            result += [*by_region.values(), *added]
        self.slabs.plan(sum(bytes_of(states[i]) for i in part) for part in new_parts)
        for part in new_parts:
            region = Region(self, [states[i] for i in part])
            row_slices = _rows_of(states[part[0]]) if by_rows and len(part) == 1 else [(None, 1)]
            for rows, per_block in row_slices:
                Bucket(region, self._slot_for(region.size if rows is None else BUCKET_BYTES), rows, per_block)
        return result

    def _slot_for(self, size: int) -> Slot:
        """The slot for a bucket of so many bytes: the two in turn, but the first one for large buckets."""
        if size > LARGE_BYTES:
            return self.slots[0]
        self._count += 1
        return self.slots[self._count % 2]

    def staged(self, op: StepOp, states: Sequence[State]) -> list[StagedStates]:
        """The states of a call, which are in one region, for each of the region's buckets."""
        return [StagedStates(bucket, op, states) for bucket in states[0].region.buckets]

    # ---- copies

    def begin(self) -> None:
        """Begins a pass. Copies that came ahead in the last pass are dropped: states may have been edited since."""
        for slot in self.slots:
            slot.holder = None
        self._next, self._next_now, self._last = self._next_now or self._next, {}, None

    def bring_next(self, bucket: Bucket) -> None:
        """To be called when a bucket's copy back was begun: begins the copy of the bucket that is expected next."""
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
    """The bytes that an entry of so many bytes takes in a region."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def bytes_of(state: State) -> int:
    """The bytes that a state takes in a region."""
    return sum(_aligned(local(x).nbytes) for x in own_entries(state).values())


def _rows_of(state: State) -> list[tuple[slice | None, int]]:
    """Slices of the rows of a state that come to the device at a time (None for all), and how many rows share a scale.

    A slice ends where a block ends. As random bits of rounding depend on the place in a block alone, its rows are
    stepped as in the whole tensor.
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
    """Bytes of a state's largest shards on any rank, so that every rank has the same buckets."""
    return sum(math.prod(largest_shard(x)) * x.element_size() for x in own_entries(state).values())


def _view(memory: Tensor, offset: int, like: Tensor, by_itself: bool = False) -> Tensor:
    """A tensor in ``memory`` with the dtype, shape and memory format of ``like``; a DTensor if ``like`` is one.

    by_itself: whether it gets a storage of its own: torch.save writes whole storages, each of one dtype.
    """
    own = local(like)
    stride = torch.empty_like(own, device="meta").stride()
    x = memory[offset : offset + own.nbytes]
    if by_itself and type(x) is Tensor and not x.is_meta:
        x = torch.from_dlpack(x) if x.numel() else x.clone()
    x = x.view(own.dtype).as_strided(own.shape, stride)
    return on_mesh(x, like.device_mesh, like.placements, like.shape) if is_dtensor(like) else x


class StatesOnHost(BlockwiseOptimizer):
    """A block-wise optimizer whose states are on the host, and come to the device for its step.

    :func:`class_on_host` mixes it into an optimizer's class. :class:`HostOffload` documents it (``step_on="device"``).
    """

    _stages: dict[torch.device, Stage | None]  # None: states stay on the device, which is the CPU
    _is_stepping = False  # whether states are read by a step, which does not wait for copies
    _transfers_of: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        self._stages = {}
        super().__init__(*args, **options)

    # ---- states

    @property
    def state(self) -> Any:
        """The states. Reading them between two steps waits until they are on the host."""
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
        """Forgets the host's memory that states are in; they alone keep it until the next step moves them."""
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
        """A ``with`` block in which states are read without waiting for copies, as the device's events order them."""
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
        """As the optimizer's own, but returns when copies and steps are queued."""
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
    """The metaclass of :func:`class_on_host`'s classes, which are pickled as the arguments of that function."""

    optimizer_class: Any
    _transfers_of: Any


@functools.cache
def class_on_host(optimizer_class: Any, transfers: Any = transfers_of) -> Any:
    """The subclass of a block-wise optimizer with states on the host. ``transfers``: returns those of a device."""
    attributes = {"optimizer_class": optimizer_class, "_transfers_of": staticmethod(transfers)}
    return _ClassOnHost(f"HostOffload({optimizer_class.__name__})", (StatesOnHost, optimizer_class), attributes)


copyreg.pickle(_ClassOnHost, lambda cls: (class_on_host, (cls.optimizer_class, cls._transfers_of)))
