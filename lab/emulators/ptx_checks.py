"""What compute-sanitizer does on a GPU, for kernels in the PTX emulator: shadow memory for every byte.

- racecheck: two accesses of different threads to one byte, of which one writes, with no barrier of theirs in between.
  Thread blocks have none in common, so within a launch any such pair of two blocks is an error. A shuffle or vote is no
  barrier for memory. But what is written after it depends on what was read before it: lanes of a warp that read a
  block's scale, reduce what they made of it, and store the new scale, are in order.
- initcheck: reads of bytes that nobody wrote, of shared memory in this thread block and of the device's memory at all.
- synccheck: a barrier or warp operation that not all its threads reach. The emulator itself raises for these.
- memcheck: addresses outside of the tensors that the launch was given, to the byte. The emulator's Memory raises.

What races does not depend on the order in which warps ran, but what is executed may: so there are several orders.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lab.emulators.ptx_emulator import WARP, Array, PtxError

NOBODY, SEVERAL = -1, -2
ORDERS = ("together", "first", "last", "random")
"""Of a thread block's warps: all side by side, or one at a time as far as it gets."""


class RaceError(PtxError):
    """Two threads use the same byte, one of them writes it, and no barrier is between."""


class InitError(PtxError):
    """A byte is read that nobody wrote."""


@dataclass
class Accesses:
    """The last accesses of each byte of a piece of memory, in one launch."""

    size: int

    def __post_init__(self) -> None:
        def of(value: int) -> Array:
            return np.full(self.size, value, np.int64)

        self.writer, self.write_clock, self.write_turn = of(NOBODY), of(0), of(0)
        self.read_block, self.read_clock = (
            of(NOBODY),
            of(0),
        )  # the blocks that read; the clock of the latest read
        self.read_warp, self.read_turn = of(NOBODY), of(0)  # the warps at that clock; that warp's turn
        self.reader = of(NOBODY)  # the threads at that turn


@dataclass
class Now:
    """Who accesses memory: the thread's number in the grid, its block and warp, and how many barriers it has passed."""

    thread: Array
    block: Array
    warp: Array
    clock: Array  # barriers of the block
    turn: Array  # of the warp (bar.warp.sync)
    exchange: Array  # those, and the warp's shuffles and votes

    def repeated(self, n: int) -> Now:
        fields = self.thread, self.block, self.warp, self.clock, self.turn, self.exchange
        return Now(*(np.repeat(x, n) for x in fields))


@dataclass
class Checks:
    """Of launches. ``unwritten``: of the device's memory that the host did not write, by address: the bytes written."""

    order: str = "together"
    seed: int = 0
    unwritten: dict[int, Array] = field(default_factory=dict)
    spoil: bool = False
    """Reads of the device's memory that race within a thread block get bits of ones, and are noted, not raised: a test
    that compares results then proves that nothing depends on them. Writes that race are always errors."""
    same_values: bool = False
    """Threads may store the same bytes to one place of shared memory with no barrier in between, as Triton's kernels
    do with what all of them know."""
    raced: set[str] = field(default_factory=set)  # the reads
    threads: int = 1  # of a thread block of this launch
    accesses: dict[int, Accesses] = field(default_factory=dict)

    def begin(self, threads: int) -> None:
        """A launch: what earlier ones did is done."""
        self.accesses.clear()
        self.threads = threads
        self.random = np.random.default_rng(self.seed)

    def of_launch(self, address: int, size: int) -> Accesses:
        return self.accesses.setdefault(address, Accesses(size))

    # ---- whose turn it is

    def chosen(self, running: Array, thread: Array) -> Array:
        """Of the threads that can run those of one warp, in all blocks."""
        if self.order == "together":
            return running
        warps = thread // WARP
        can = np.unique(warps[running])
        one = {"first": can[0], "last": can[-1]}.get(self.order)
        return running & (warps == (self.random.choice(can) if one is None else one))

    # ---- accesses

    def read(
        self, a: Accesses, written: Array | None, places: Array, now: Now, what: str, may_spoil: bool = False
    ) -> Array | None:
        """``places``: of each thread its bytes. Returns which threads get bits of ones, if any does."""
        n = now.repeated(places.shape[1])
        at = places.reshape(-1)
        if written is not None and not written[at].all():
            i = int(np.argmin(written[at]))
            raise InitError(f"{what}: thread {n.thread[i]} reads byte {at[i]} of {a.size}, which nobody wrote")
        wrong = self._against_writers(a, at, n, what, may_spoil and self.spoil)
        same_block = (a.read_block[at] == n.block) | (a.read_block[at] == NOBODY)
        a.read_block[at] = np.where(same_block, n.block, SEVERAL)
        self._several(a.read_block, at, n.block)
        later = (a.reader[at] == NOBODY) | (n.clock > a.read_clock[at])
        same_warp = later | (a.read_warp[at] == n.warp)
        fresh = later | (same_warp & (n.exchange > a.read_turn[at]))
        same_thread = fresh | (a.reader[at] == n.thread)
        a.read_clock[at], a.read_turn[at] = n.clock, n.exchange
        a.read_warp[at] = np.where(same_warp, n.warp, SEVERAL)
        a.reader[at] = np.where(same_thread, n.thread, SEVERAL)
        self._several(a.read_warp, at, n.warp)
        self._several(a.reader, at, n.thread)
        return None if wrong is None else wrong.reshape(places.shape).any(1)

    def write(
        self, a: Accesses, written: Array | None, places: Array, now: Now, what: str, may_spoil: bool = False
    ) -> None:
        n = now.repeated(places.shape[1])
        at = places.reshape(-1)
        self._against_writers(a, at, n, what)
        here = a.read_block[at] != NOBODY
        other_block = here & (a.read_block[at] != n.block)
        unordered = (a.read_block[at] == n.block) & (a.read_clock[at] == n.clock) & (a.reader[at] != n.thread)
        before = (a.read_warp[at] == n.warp) & (a.read_turn[at] < n.exchange)
        wrong = other_block | (unordered & ~before)
        if may_spoil and self.spoil:  # in another order of warps these reads come later, and are spoiled
            wrong = other_block
        if wrong.any():
            i = int(np.argmax(wrong))
            raise RaceError(f"{what}: thread {n.thread[i]} writes byte {at[i]} of {a.size}, which another reads")
        a.writer[at], a.write_clock[at], a.write_turn[at] = n.thread, n.clock, n.turn
        twice = a.writer[at] != n.thread  # the last of this instruction stands
        if twice.any():
            i = int(np.argmax(twice))
            raise RaceError(f"{what}: threads {n.thread[i]} and {a.writer[at[i]]} write byte {at[i]} of {a.size}")
        a.read_block[at] = a.reader[at] = a.read_warp[at] = NOBODY
        if written is not None:
            written[at] = True

    def _against_writers(self, a: Accesses, at: Array, n: Now, what: str, may_spoil: bool = False) -> Array | None:
        writer = a.writer[at]
        other = (writer != NOBODY) & (writer != n.thread)
        if not other.any():
            return None
        threads = self.threads
        same_block = writer // threads == n.block
        same_warp = same_block & (writer % threads // WARP == n.thread % threads // WARP)
        ordered = (same_block & (a.write_clock[at] < n.clock)) | (same_warp & (a.write_turn[at] < n.turn))
        wrong = other & ~ordered
        if may_spoil and wrong.any() and same_block[wrong].all():
            self.raced.add(what)
            return wrong
        if wrong.any():
            i = int(np.argmax(wrong))
            raise RaceError(
                f"{what}: thread {n.thread[i]} uses byte {at[i]} of {a.size}, which thread {writer[i]} writes"
            )
        return None

    @staticmethod
    def _several(of_byte: Array, at: Array, mine: Array) -> None:
        """Where several threads of one instruction have the same byte, the last is there: SEVERAL for all."""
        lost = (of_byte[at] != mine) & (of_byte[at] != SEVERAL)
        of_byte[at[lost]] = SEVERAL
