"""Checks kernels in the PTX emulator as compute-sanitizer does on a GPU, with shadow memory for every byte.

- racecheck: two threads access one byte, one of them writes, and no barrier of both is in between. Thread blocks have
  no barrier in common, so any such accesses of two blocks in a launch are an error. A shuffle or vote is no barrier for
  memory, but a write after it depends on the reads before it: lanes of a warp may read a block's scale, reduce what
  they computed from it, and store the new scale.
- initcheck: reads of shared memory that the thread block did not write, and of device memory that nobody wrote.
- synccheck: a barrier or warp operation that not all its threads reach. The emulator itself raises for these.
- memcheck: addresses outside of the tensors that the launch was given, to the byte. The emulator's Memory raises.

Which accesses race does not depend on the order of warps, but which are executed may: so there are several orders.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lab.emulators.ptx_emulator import WARP, Array, PtxError

NOBODY, SEVERAL = -1, -2  # in place of the number of a thread, warp or block
ORDERS = ("together", "first", "last", "random")
"""How a thread block's warps run: all side by side, or one at a time as far as it gets."""


class RaceError(PtxError):
    """Two threads use the same byte, one of them writes it, and no barrier is between."""


class InitError(PtxError):
    """A byte is read that nobody wrote."""


@dataclass
class Accesses:
    """The last accesses of each byte of a piece of memory, in one launch."""

    size: int

    def __post_init__(self) -> None:
        def filled(value: int) -> Array:
            return np.full(self.size, value, np.int64)

        self.writer, self.write_clock, self.write_turn = filled(NOBODY), filled(0), filled(0)
        self.read_block, self.read_clock = filled(NOBODY), filled(0)  # the blocks that read; the latest read's clock
        self.read_warp, self.read_turn = filled(NOBODY), filled(0)  # the warps at that clock; that warp's turn
        self.reader = filled(NOBODY)  # the threads at that turn


@dataclass
class Now:
    """The threads of an access: their numbers in the grid, blocks and warps, and how many barriers each has passed."""

    thread: Array
    block: Array
    warp: Array
    clock: Array  # barriers of the block
    turn: Array  # of the warp (bar.warp.sync)
    exchange: Array  # of the warp, with its shuffles and votes

    def repeated(self, n: int) -> Now:
        fields = self.thread, self.block, self.warp, self.clock, self.turn, self.exchange
        return Now(*(np.repeat(x, n) for x in fields))


@dataclass
class Checks:
    """Checks of launches, one after the other."""

    order: str = "together"
    seed: int = 0
    unwritten: dict[int, Array] = field(default_factory=dict)
    """Of buffers that the host did not write, by address: whether a kernel has written each byte."""
    spoil: bool = False
    """Reads of device memory that race within a thread block get bits of ones and are noted in ``raced``, not raised: a
    test that compares results then proves that none depends on them. Writes that race are always errors."""
    same_values: bool = False
    """Threads may store equal bytes to one place of shared memory without a barrier, as they do in Triton's kernels."""
    raced: set[str] = field(default_factory=set)  # the instructions of spoiled reads
    threads: int = 1  # of a thread block of this launch
    accesses: dict[int, Accesses] = field(default_factory=dict)

    def begin(self, threads: int) -> None:
        """Begins a launch. Accesses of earlier ones cannot race with it."""
        self.accesses.clear()
        self.threads = threads
        self.random = np.random.default_rng(self.seed)

    def of_launch(self, address: int, size: int) -> Accesses:
        return self.accesses.setdefault(address, Accesses(size))

    # ---- whose turn it is

    def chosen(self, running: Array, thread: Array) -> Array:
        """The running threads that go on: those of one warp number in all blocks, or all, by ``order``."""
        if self.order == "together":
            return running
        warps = thread // WARP
        candidates = np.unique(warps[running])
        warp = {"first": candidates[0], "last": candidates[-1]}.get(self.order)
        return running & (warps == (self.random.choice(candidates) if warp is None else warp))

    # ---- accesses

    def read(
        self, a: Accesses, written: Array | None, places: Array, now: Now, what: str, may_spoil: bool = False
    ) -> Array | None:
        """``places``: a row of byte offsets per thread. Returns the threads whose read is spoiled, None for none."""
        who = now.repeated(places.shape[1])
        at = places.reshape(-1)
        if written is not None and not written[at].all():
            i = int(np.argmin(written[at]))
            raise InitError(f"{what}: thread {who.thread[i]} reads byte {at[i]} of {a.size}, which nobody wrote")
        wrong = self._against_writers(a, at, who, what, may_spoil and self.spoil)
        same_block = (a.read_block[at] == who.block) | (a.read_block[at] == NOBODY)
        a.read_block[at] = np.where(same_block, who.block, SEVERAL)
        self._several(a.read_block, at, who.block)
        later = (a.reader[at] == NOBODY) | (who.clock > a.read_clock[at])
        same_warp = later | (a.read_warp[at] == who.warp)
        fresh = later | (same_warp & (who.exchange > a.read_turn[at]))
        same_thread = fresh | (a.reader[at] == who.thread)
        a.read_clock[at], a.read_turn[at] = who.clock, who.exchange
        a.read_warp[at] = np.where(same_warp, who.warp, SEVERAL)
        a.reader[at] = np.where(same_thread, who.thread, SEVERAL)
        self._several(a.read_warp, at, who.warp)
        self._several(a.reader, at, who.thread)
        return None if wrong is None else wrong.reshape(places.shape).any(1)

    def write(
        self, a: Accesses, written: Array | None, places: Array, now: Now, what: str, may_spoil: bool = False
    ) -> None:
        who = now.repeated(places.shape[1])
        at = places.reshape(-1)
        self._against_writers(a, at, who, what)
        was_read = a.read_block[at] != NOBODY
        other_block = was_read & (a.read_block[at] != who.block)
        unordered = (a.read_block[at] == who.block) & (a.read_clock[at] == who.clock) & (a.reader[at] != who.thread)
        before_exchange = (a.read_warp[at] == who.warp) & (a.read_turn[at] < who.exchange)
        wrong = other_block | (unordered & ~before_exchange)
        if may_spoil and self.spoil:  # if the reads came after this write, they would be spoiled
            wrong = other_block
        if wrong.any():
            i = int(np.argmax(wrong))
            raise RaceError(f"{what}: thread {who.thread[i]} writes byte {at[i]} of {a.size}, which another reads")
        a.writer[at], a.write_clock[at], a.write_turn[at] = who.thread, who.clock, who.turn
        twice = a.writer[at] != who.thread  # of threads of this instruction that write one byte the last stays
        if twice.any():
            i = int(np.argmax(twice))
            raise RaceError(f"{what}: threads {who.thread[i]} and {a.writer[at[i]]} write byte {at[i]} of {a.size}")
        a.read_block[at] = a.reader[at] = a.read_warp[at] = NOBODY
        if written is not None:
            written[at] = True

    def _against_writers(self, a: Accesses, at: Array, who: Now, what: str, may_spoil: bool = False) -> Array | None:
        """Raises where another thread's write races; or returns where, if that is to be spoiled."""
        writer = a.writer[at]
        other = (writer != NOBODY) & (writer != who.thread)
        if not other.any():
            return None
        threads = self.threads
        same_block = writer // threads == who.block
        same_warp = same_block & (writer % threads // WARP == who.thread % threads // WARP)
        ordered = (same_block & (a.write_clock[at] < who.clock)) | (same_warp & (a.write_turn[at] < who.turn))
        wrong = other & ~ordered
        if may_spoil and wrong.any() and same_block[wrong].all():
            self.raced.add(what)
            return wrong
        if wrong.any():
            i = int(np.argmax(wrong))
            raise RaceError(
                f"{what}: thread {who.thread[i]} uses byte {at[i]} of {a.size}, which thread {writer[i]} writes"
            )
        return None

    @staticmethod
    def _several(of_byte: Array, at: Array, mine: Array) -> None:
        """Notes SEVERAL for bytes that threads of one instruction share: assignment left the last one's number."""
        overwritten = (of_byte[at] != mine) & (of_byte[at] != SEVERAL)
        of_byte[at[overwritten]] = SEVERAL
