"""The way of stored tensors to the host and back: when they leave and come back, and the order of the copies.

What a forward pass stores is a stack: the backward pass needs the newest first. The newest ``ahead`` bytes stay on the
device, so that what the last layers store never leaves, older ones are copied to the host, and when a backward pass
takes one, those below it come back, up to ``ahead`` bytes of them. Each direction has a stream of its own. The host
waits for nothing: a tensor's memory on the device is freed when its copy is known to have ended, or when the computing
stream has been made to wait for the copy's event; and that wait comes only when more than ``ahead`` bytes are leaving.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..quant.layout import is_dense
from .codecs import Layout
from .copies import Copies, made_by_a_transfer
from .host_pool import ALIGNMENT, HostPool, Piece
from .records import AWAY, BACK, EARLY, HELD, LEAVING, STAYS, Record, Transfer
from .storage import is_present

LEAST_BYTES = 2**18
"""Smaller tensors stay: over PCIe 4 x16 this many bytes take 10 us, about as long as the host needs for the calls."""
BLOCKS = 24
"""Where the number of a model's blocks is not known (``quantize_saved``)."""
PARTS = 4
"""Transfers that a block's bytes are made in: several tensors share the calls for an event."""


class Offload(NamedTuple):
    """Options: ``ahead`` bytes, or None for what a block stores: a forward pass's bytes divided by ``blocks``."""

    ahead: int | None = None
    blocks: int = BLOCKS


class Away:
    """The owner of a record, in place of its tensors."""

    __slots__ = ("link", "record")

    def __init__(self, link: Link, record: Record) -> None:
        self.link, self.record = link, record

    def tensors(self) -> list[Tensor]:
        """The tensors on the device, which the current stream may use."""
        return self.link.take(self.record)

    def __del__(self) -> None:
        self.link.forget(self.record)


class Link:
    """All that is stored for one device, and its way to the host and back."""

    def __init__(self, device: torch.device, copies: Copies, mode: Any = None) -> None:
        self.device, self.copies, self.mode = device, copies, mode
        self.pool = HostPool(copies.slab)
        self.lock = threading.RLock()  # each device has its own thread in the backward pass
        self.stack: list[Record] = []  # oldest first, dead ones among them
        self.dead: deque[Record] = deque()  # not yet taken note of
        self.staying: deque[Record] = deque()
        self.held: deque[Record] = deque()
        self.leaving: deque[Transfer] = deque()
        self.back: OrderedDict[Record, None] = OrderedDict()  # the last that was asked for at the end
        self.staying_bytes = self.leaving_bytes = self.back_bytes = 0
        self.live = self.most = self.most_before = 0  # bytes now, and at most since there were none and before that
        self.few = 64
        self.count = 0  # of transfers
        self.enough = 0  # bytes that may be taken before more is sent for
        self.last_taken = -1  # its index
        self.last_up: Transfer | None = None
        self.read: Transfer | None = None  # host memory that is free now may be written after it
        self.views: dict[tuple[int, torch.dtype], Tensor] = {}  # of slabs
        self.options = Offload()

    @property
    def ahead(self) -> int:
        given, blocks = self.options
        return max(self.most, self.most_before) // blocks if given is None else given

    # ---- storing

    def put(self, data: Sequence[Tensor], options: Offload) -> Sequence[Tensor] | Away:
        """Tensors that may leave from now on; they themselves, where all of them stay."""
        large = [x for x in data if x.nbytes >= LEAST_BYTES and is_of_dense_memory(x)]
        if not large or self.copies.is_capturing():
            return list(data)
        nbytes = sum([x.nbytes for x in large])
        with self.lock:
            if self.dead:
                self.note_dead()
            self.options, stack = options, self.stack
            while stack and not stack[-1].alive:
                stack.pop()
            record = Record(data, large, nbytes, len(stack))
            found = Away(self, record)
            stack.append(record)
            self.staying.append(record)
            self.staying_bytes += nbytes
            self.live += nbytes
            self.most = max(self.most, self.live)
            self.last_taken = -1
            ahead = self.ahead
            if self.staying_bytes > ahead or self.held:
                self._send(ahead)
            elif self.leaving:
                self._free_what_left(ahead)
        return found

    def _send(self, ahead: int) -> None:
        """Begins the copies of the oldest, so that ``ahead`` bytes stay, and a part of them more can."""
        leave: list[Record] = []
        try:
            self._choose(ahead, leave)
        except BaseException:  # the host has no more memory: all of them stay
            for record in reversed(leave):
                if record.state == HELD:
                    self.held.appendleft(record)
                else:
                    self.staying.appendleft(record)
                    self.staying_bytes += record.nbytes
            raise
        if leave:
            pairs = [(h, x) for record in leave for h, x in self._parts(record)]
            self.count += 1
            transfer = Transfer(leave, self.copies.down(pairs, self.read and self.read.event), self.count)
            self.read = None
            for record in leave:
                record.left, record.state = transfer, LEAVING
            self.leaving.append(transfer)
            self.leaving_bytes += transfer.nbytes
        self._free_what_left(ahead)

    def _choose(self, ahead: int, leave: list[Record]) -> None:
        """Adds those that leave now, which have host memory then."""
        most = ahead - ahead // PARTS if self.staying_bytes > ahead else ahead
        while self.staying and (self.staying_bytes > most or not self.staying[0].alive):
            record = self.staying[0]
            if record.alive:
                self._find_host_memory(record, leave)
                self.staying_bytes -= record.nbytes
            self.staying.popleft()
        for _ in range(min(2, len(self.held))):
            if (record := self.held.popleft()).alive:
                self._find_host_memory(record, leave)

    def _find_host_memory(self, record: Record, leave: list[Record]) -> None:
        assert record.tensors is not None
        if all(map(is_held_elsewhere, record.tensors)) or not all(map(is_present, record.tensors)):
            record.state = HELD
            self.held.append(record)
            return
        if record.pieces is None:
            record.pieces = self.pool.take(sum([-(-x.nbytes // ALIGNMENT) for x in record.tensors]) * ALIGNMENT)
            if len(record.pieces) == 1 and self.mode is None:
                record.hosts = self._hosts(record.pieces[0], record.tensors)
            else:
                record.layouts = [Layout(x.shape, x.stride(), x.dtype) for x in record.tensors]
        leave.append(record)

    def _hosts(self, piece: Piece, like: list[Tensor]) -> list[Tensor]:
        """A piece as tensors with the shapes and strides of others."""
        slab, start, _ = piece
        found = []
        for x in like:
            if (view := self.views.get((slab, x.dtype))) is None:
                view = self.views[slab, x.dtype] = self.pool.slabs[slab].view(x.dtype)
            found.append(view.as_strided(x.shape, x.stride(), start // x.element_size()))
            start += -(-x.nbytes // ALIGNMENT) * ALIGNMENT
        return found

    def _free_what_left(self, ahead: int) -> None:
        while self.leaving:
            transfer = self.leaving[0]
            if not self.copies.is_done(transfer.event):
                if self.leaving_bytes <= ahead or len(self.leaving) == 1:
                    return
                # Its memory may be given to what the current stream does next.
                self.copies.wait(transfer.event)
            self._free(self.leaving.popleft())

    def _free(self, transfer: Transfer) -> None:
        self.leaving_bytes -= transfer.nbytes
        for record in transfer.records:
            record.tensors, record.state = None, AWAY

    def _parts(self, record: Record) -> Iterable[tuple[Tensor, Tensor]]:
        """(host, device): the tensors, or the bytes that are in each of several pieces."""
        assert record.tensors is not None
        if record.hosts is not None:
            return zip(record.hosts, record.tensors, strict=True)
        return [] if self.mode is not None else self._bytes(record.pieces or [], record.tensors)

    def _bytes(self, pieces: Iterable[Piece], tensors: Iterable[Tensor]) -> Iterable[tuple[Tensor, Tensor]]:
        pieces, room, slab, start = iter(pieces), 0, 0, 0
        for x in tensors:
            flat = x.as_strided((x.numel(),), (1,)).view(torch.uint8)
            done = 0
            while done < len(flat):
                if room <= 0:
                    slab, start, room = next(pieces)
                size = min(room, len(flat) - done)
                yield self.pool.slabs[slab][start : start + size], flat[done : done + size]
                start, room, done = start + size, room - size, done + size
            room -= (pad := -len(flat) % ALIGNMENT)
            start += pad

    # ---- taking

    def take(self, record: Record) -> list[Tensor]:
        """A record's tensors; those that are below it on the stack begin to come back."""
        with self.lock:
            if self.dead:
                self.note_dead()
            # What is on its way and alive is needed next, and remains.
            while self.leaving and not self.leaving[-1].alive and self.copies.is_done(self.leaving[-1].event):
                self._free(self.leaving.pop())
            missed = record.tensors is None
            if missed:
                self._fetch([record])
            if record.state == EARLY:
                record.state = BACK
                self.back_bytes += record.nbytes
            if record.state == BACK:
                stream, transfer = self.copies.stream(), record.back
                assert transfer is not None
                if transfer.waited is not stream and transfer.waited != stream:
                    self.copies.wait(transfer.event)
                    transfer.waited = stream
                if record.stream is not stream and record.stream != stream:
                    for x in record.tensors or ():
                        self.copies.used_here(x)
                self._keep_few_back(record)
            found = record.found()
            self.enough -= record.nbytes
            behind = missed or self.enough <= 0 or record.index > self.last_taken
            # Not where a forward pass looks at something.
            if behind and torch._C._current_graph_task_id() != -1:
                self._fetch_below(record)
            self.last_taken = record.index
        return found

    def _keep_few_back(self, record: Record) -> None:
        """Frees what was asked for long ago, which a backward pass that keeps its graph leaves alive."""
        self.back[record] = None
        self.back.move_to_end(record)
        while self.back_bytes > self.ahead and len(self.back) > 1:
            other, _ = self.back.popitem(last=False)
            self.back_bytes -= other.nbytes
            if other.alive:
                other.tensors, other.state = None, AWAY

    def _fetch_below(self, record: Record) -> None:
        """Sends for what is needed next, up to ``ahead`` bytes with what is on the device."""
        ahead, early = self.ahead, 0
        wanted: list[Record] = []
        for i in range(record.index - 1, -1, -1):
            if early >= ahead:
                break
            other = self.stack[i]
            if not other.alive or other.state in (HELD, BACK):
                continue
            if other.state == AWAY:
                if early and early + other.nbytes > ahead:
                    break
                wanted.append(other)
            early += other.nbytes
        self.enough = early - ahead + ahead // PARTS
        if wanted:
            try:
                self._fetch(wanted)
            except torch.OutOfMemoryError:  # they come when they are asked for
                self.enough = 0

    def _fetch(self, records: list[Record]) -> None:
        stream = self.copies.stream()
        empty = [self._empty(record) for record in records]  # may raise; nothing is changed then
        for record, tensors in zip(records, empty, strict=True):
            record.tensors, record.stream = tensors, stream
        del empty
        pairs = [(x, h) for record in records for h, x in self._parts(record)]
        last = max([record.left.number for record in records if record.left], default=0)
        after = next((r.left.event for r in records if r.left and r.left.number == last), None)
        self.count += 1
        transfer = Transfer(records, self.copies.up(pairs, after), self.count)
        for record in records:
            record.back, record.state = transfer, EARLY
        self.last_up = transfer

    def _empty(self, record: Record) -> list[Tensor]:
        """Memory on the device."""
        if record.hosts is not None:
            return [torch.empty_like(h, device=self.device) for h in record.hosts]
        with contextlib.nullcontext() if self.mode is None else made_by_a_transfer(self.mode):
            return [
                torch.empty_strided(shape, stride, dtype=dtype, device=self.device)
                for shape, stride, dtype in record.layouts
            ]

    # ---- the end

    def forget(self, record: Record) -> None:
        """A record's last owner is gone. Takes no lock: this may be called at any time, from any thread."""
        record.alive = False
        if record.state in (STAYS, HELD, BACK):
            record.tensors = None
        self.dead.append(record)

    def note_dead(self) -> None:
        """Gives back the host memory of records that were forgotten."""
        while self.dead:
            record = self.dead.popleft()
            self.live -= record.nbytes
            if record.state == STAYS:
                self.staying_bytes -= record.nbytes
            elif record.state == EARLY:
                assert record.back is not None
                self.copies.wait(record.back.event)  # what is allocated next may get this memory
                record.tensors = None
            elif record in self.back:
                del self.back[record]
                self.back_bytes -= record.nbytes
            if record.left is not None:
                record.left.alive -= 1
            if record.pieces is not None:
                self.pool.give(record.pieces)
                record.hosts = None
                self.read = self.read if record.back is None else self.last_up
            self.few -= 1
        if self.live == 0 and self.most:
            self.most_before, self.most = self.most, 0
            for records in (self.stack, self.staying, self.held):
                records.clear()
        if self.few <= 0:  # of several graphs the older one may be used first
            self.stack = [record for record in self.stack if record.alive]
            for i, record in enumerate(self.stack):
                record.index = i
            self.few = max(64, len(self.stack))

    def empty(self) -> int:
        """Frees host memory that is not used; returns the bytes."""
        with self.lock:
            self.note_dead()
            freed = self.pool.empty()
            self.views = {key: view for key, view in self.views.items() if key[0] in self.pool.slabs}
        return freed


def is_of_dense_memory(x: Tensor) -> bool:
    """Whether the elements are all of a part of memory."""
    return x.layout == torch.strided and (x.is_contiguous() or is_dense(x.shape, x.stride()))


def is_held_elsewhere(x: Tensor) -> bool:
    """Whether others than a record hold the memory: what runs now, or a model that has it as a buffer."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata) > 2  # x, and the storage's object here
