"""Host memory for what leaves a device: slabs that are kept from step to step, and pieces of them."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Callable
from typing import Any, NamedTuple

ALIGNMENT = 512
LEAST_SLAB, MOST_SLAB = 2**20, 2**28
SHARE = 32
"""Where less is asked for, a new slab has this part of all slabs: so little may stay unused."""
LEAST_PIECE = 2**16


class Piece(NamedTuple):
    """Bytes ``start`` to ``start + size`` of a slab."""

    slab: int
    start: int
    size: int


class HostPool:
    """Cuts slabs into pieces.

    Sizes of slabs are powers of two, because torch's allocator of pinned memory rounds up to those. What no single gap
    has room for gets several pieces, so that sequences of other lengths need no more memory than their bytes.
    """

    def __init__(self, new_slab: Callable[[int], Any]) -> None:
        self._new_slab = new_slab
        self.slabs: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._gaps: list[Piece] = []  # in the order of slabs and places
        self._number = 0
        self.total = self.used = self.most = 0  # bytes of slabs, in use now, and in use at most

    def take(self, size: int) -> list[Piece]:
        """Pieces with at least so many bytes together."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        found: list[Piece] = []
        try:
            while size:
                i = self._gap_for(size)
                found.append(self._cut(i, min(self._gaps[i].size, size)))
                self.used += found[-1].size
                size -= found[-1].size
        except BaseException:  # the host has no more memory
            self.give(found)
            raise
        self.most = max(self.most, self.used)
        return found

    def give(self, pieces: list[Piece]) -> None:
        """Takes pieces back."""
        for piece in pieces:
            self.used -= piece.size
            i = bisect(self._gaps, piece)
            self._gaps.insert(i, piece)
            for j in (i, i - 1):  # joined with the gap after, then with the one before
                if 0 <= j < len(self._gaps) - 1:
                    a, b = self._gaps[j : j + 2]
                    if a.slab == b.slab and a.start + a.size == b.start:
                        self._gaps[j : j + 2] = [Piece(a.slab, a.start, a.size + b.size)]

    def empty(self) -> int:
        """Frees the slabs of which nothing is used; returns their bytes."""
        free = [gap for gap in self._gaps if gap.size == self._sizes[gap.slab]]
        for gap in free:
            del self.slabs[gap.slab], self._sizes[gap.slab]
            self._gaps.remove(gap)
            self.total -= gap.size
        return sum(gap.size for gap in free)

    def _gap_for(self, size: int) -> int:
        """The first gap that has room, else the first that is worth a copy of its own, else a new slab."""
        for least in (size, LEAST_PIECE):
            for i, gap in enumerate(self._gaps):
                if gap.size >= least:
                    return i
        return bisect(self._gaps, self._grow(size)) - 1

    def _cut(self, i: int, size: int) -> Piece:
        slab, start, room = self._gaps[i]
        if room == size:
            del self._gaps[i]
        else:
            self._gaps[i] = Piece(slab, start + size, room - size)
        return Piece(slab, start, size)

    def _grow(self, size: int) -> Piece:
        # A power of two, downwards: what is left of the size comes from the next slab.
        wanted = max(size, self.total // SHARE)
        room = min(MOST_SLAB, max(LEAST_SLAB, 1 << wanted.bit_length() - 1))
        self.slabs[self._number] = self._new_slab(room)  # may raise
        self._sizes[self._number] = room
        gap = Piece(self._number, 0, room)
        insort(self._gaps, gap)
        self._number += 1
        self.total += room
        return gap
