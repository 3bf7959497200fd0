"""Pinned memory for many tensors, without the rounding that torch's allocator does for each."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

SLAB = 2**30
UNIT = 512  # bytes to which each tensor is aligned


class Slabs:
    """Host memory for tensors that stay, cut from slabs whose sizes are powers of two.

    torch's allocator of pinned memory rounds each tensor up to a power of two: 170 MiB to 256. So slabs of a GiB, and
    smaller ones for the rest, are allocated when they are needed. Which tensor goes where is planned: the largest
    first, each into the smallest gap that is large enough.

    Args:
        sizes: bytes of the tensors that will come, in any order.
        allocate: makes a slab of so many bytes; by default pinned.
    """

    def __init__(self, sizes: Iterable[int], allocate: Callable[[int], Tensor] | None = None) -> None:
        self._allocate = allocate or _pinned
        self._made: dict[int, Tensor] = {}
        self.slabs: list[int] = []
        """Sizes of the slabs."""
        self._places: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # of tensors by size: slab, offset
        aligned = sorted(map(_aligned, sizes), reverse=True)
        rest = sum(aligned)
        gaps: list[tuple[int, int, int]] = []  # sizes with slabs and offsets, the smallest first
        for size in aligned:
            at = bisect.bisect_left(gaps, (size, 0, 0))
            if at == len(gaps):
                gaps.append((self._add(size, rest), len(self.slabs) - 1, 0))
            gap, slab, offset = gaps.pop(at)
            self._places[size].append((slab, offset))
            bisect.insort(gaps, (gap - size, slab, offset + size))
            rest -= size

    def _add(self, size: int, rest: int) -> int:
        """Another slab, which holds a tensor and, as long as it is not a GiB, no more than what is left."""
        least, most = 1 << (size - 1).bit_length(), 1 << (rest.bit_length() - 1)
        self.slabs.append(max(least, min(SLAB, most)))
        return self.slabs[-1]

    def copy_of(self, x: Tensor) -> Tensor:
        """A contiguous copy of a tensor of one of the sizes, in a slab."""
        slab, offset = self._places[_aligned(x.nbytes)].pop(0)
        if slab not in self._made:
            self._made[slab] = self._allocate(self.slabs[slab])
        return self._made[slab][offset : offset + x.nbytes].view(x.dtype).view(x.shape).copy_(x)


def _aligned(size: int) -> int:
    return -(-max(size, 1) // UNIT) * UNIT


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
