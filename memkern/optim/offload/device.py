"""Optimizer states in the host's memory: they come over the link when the device steps, and go back."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...schemas import StepOp
from .. import replaced
from ..backward import without_hooks
from ..base import BlockwiseOptimizer
from ..dtensor.shards import is_dtensor, largest_shard, local, on_mesh, ranks_of
from ..muon_step import buckets
from ..state import State, own_entries, state_args
from .pinned import Slabs
from .transfers import Transfers, transfers_of

BUCKET_BYTES = 64 * 2**20
"""States are copied together up to so many bytes, or those of one parameter that has more: 1.2 ms at 55 GB/s."""
LARGE_BYTES = 4 * BUCKET_BYTES
"""Buckets above this, of embeddings as a rule, share one of the two buffers."""
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


class Bucket:
    """States in one piece of the host's memory. ``optimizer.state`` has views of it."""

    came: Any = None  # the event of the last copy to the device
    saved: Any = None  # and of the last one back

    def __init__(self, stage: Stage, slot: Slot, states: Sequence[State]) -> None:
        self.stage, self.slot = stage, slot
        self.size = sum(map(bytes_of, states))
        self.host = stage.slabs.take(self.size)
        self.places: dict[int, dict[str, tuple[int, Tensor]]] = {}  # by a state's id: its entries
        self._views: dict[int, dict[str, Tensor]] = {}
        self._views_of: Tensor | None = None
        offset = 0
        for state in states:
            places = self.places[id(state)] = {}
            for key, x in own_entries(state).items():
                view = _view(self.host, offset, x, by_itself=True)
                local(view).copy_(local(x))
                places[key], state[key] = (offset, view), view
                offset += _aligned(local(x).nbytes)
            state.bucket = self
        slot.reserve(self.size)

    def has(self, state: State) -> bool:
        """Whether a state's entries are in the bucket. Values of ones that were replaced by others alike are taken."""
        places, entries = self.places.get(id(state), {}), own_entries(state)
        if state.bucket is not self or {*places} != {*entries}:
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

    @contextlib.contextmanager
    def brought(self) -> Iterator[None]:
        """The scope in which the states are on the device."""
        transfers, slot = self.stage.transfers, self.slot
        self.stage.bring(self)
        transfers.device_waits(self.came)
        try:
            yield
        except BaseException:
            slot.holder = None
            raise
        self.saved = slot.free = transfers.to_host(self.host, slot.memory[: self.size])
        self.stage.stepped(self)


class Staged:
    """The states of a call: some of a bucket's, or all."""

    def __init__(self, bucket: Bucket, op: StepOp, states: Sequence[State]) -> None:
        self.bucket, self.op, self.numbers = bucket, op, [*map(id, states)]
        self._tensors: dict[str, Any] = {}
        self._views: Any = None

    def tensors(self) -> dict[str, Any]:
        """The op's arguments, on the device."""
        if (views := self.bucket.views()) is not self._views:
            self._views, self._tensors = views, state_args(self.op, [views[number] for number in self.numbers])
        return self._tensors


class Stage:
    """The way of states to a device and back: two buffers, and a stream of copies in each direction.

    While one bucket is stepped, the last one goes back and the next one comes: the one that came next in the last pass,
    which is the last step, or of a step in the backward pass the last backward pass. Nothing waits on the host.
    """

    def __init__(self, device: torch.device, transfers: Transfers) -> None:
        self.device, self.transfers = device, transfers
        self.slabs = Slabs(allocate=transfers.host_memory)
        self.slots = Slot(self), Slot(self)
        self._count = 0
        self._next: dict[Bucket, Bucket] = {}  # in the last pass
        self._next_now: dict[Bucket, Bucket] = {}
        self._last: Bucket | None = None
        self._saved: Any = None

    # ---- buckets

    @torch.no_grad()
    @torch.inference_mode(False)
    def cut(self, parts: Sequence[Sequence[int]], states: Sequence[State], whole: bool) -> list[list[int]]:
        """The parts of a step, cut so that the states of each are in one bucket; ones that are in none get new ones.

        Args:
            parts: numbers of states.
            whole: whether a part whose states are in no bucket gets one, and not one for each ``BUCKET_BYTES``.
        """
        self.settle()
        found: list[list[int]] = []
        new: list[list[int]] = []
        for part in parts:
            of_bucket: dict[Any, list[int]] = {}
            for i in part:
                bucket = states[i].bucket
                known = bucket is not None and bucket.stage is self and bucket.has(states[i])
                of_bucket.setdefault(bucket if known else None, []).append(i)
            loose = of_bucket.pop(None, [])
            fresh = [loose] if whole and loose else [*buckets(loose, states, _bytes_of_largest, BUCKET_BYTES)]
            new += fresh
            found += [*of_bucket.values(), *fresh]
        self.slabs.plan(sum(bytes_of(states[i]) for i in some) for some in new)
        for some in new:
            size = sum(bytes_of(states[i]) for i in some)
            self._count += size <= LARGE_BYTES
            Bucket(self, self.slots[self._count % 2 if size <= LARGE_BYTES else 0], [states[i] for i in some])
        return found

    def states_of(self, op: StepOp, states: Sequence[State]) -> Staged:
        """The states of a call, which are in one bucket."""
        return Staged(states[0].bucket, op, states)

    # ---- copies

    def begin(self) -> None:
        """A pass begins. What came ahead of time in the last one and was not stepped may have been edited since."""
        for slot in self.slots:
            slot.holder = None
        self._next, self._next_now, self._last = self._next_now or self._next, {}, None

    def bring(self, bucket: Bucket) -> None:
        """Begins the copy of a bucket to the device, unless it is there."""
        slot = bucket.slot
        if slot.holder is not bucket:
            after = [slot.free] if bucket.saved is None else [slot.free, bucket.saved]
            bucket.came = self.transfers.to_device(slot.memory[: bucket.size], bucket.host, *after)
            slot.holder = bucket

    def stepped(self, bucket: Bucket) -> None:
        """A bucket was stepped, and the copy back was begun."""
        self._saved = bucket.saved
        if self._last is not None:
            self._next_now[self._last] = bucket
        self._last = bucket
        if (following := self._next.get(bucket)) is not None:
            self.bring(following)

    def settle(self) -> None:
        """Waits until the states are on the host."""
        if self._saved is not None:
            self.transfers.host_waits(self._saved)
            self._saved = None


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def bytes_of(state: State) -> int:
    """Bytes of a state in a bucket."""
    return sum(_aligned(local(x).nbytes) for x in own_entries(state).values())


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
            self._settle()
        return vars(self)["state"]

    @state.setter
    def state(self, states: Any) -> None:
        vars(self)["state"] = states

    def _settle(self) -> None:
        for stage in vars(self).get("_stages", {}).values():
            if stage is not None:
                stage.settle()

    def _forget_stages(self) -> None:
        """Lets go of the host's memory that states were in, whose owners they are until the next step moves them."""
        self._settle()
        self._stages = {}

    def _stage_of(self, device: torch.device) -> Stage | None:
        if device not in self._stages:
            transfers = self._transfers_of(device)
            self._stages[device] = None if transfers.shares_memory else Stage(device, transfers)
        return self._stages[device]

    def _beside(self, p: Tensor, values: bool = False) -> Tensor:
        if self._stage_of(p.device) is None:
            return p
        return p.detach().cpu() if values else torch.empty_like(p.detach(), device="cpu")

    def _convert_storage(self, p: Tensor, group: dict[str, Any]) -> None:
        self._settle()
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
