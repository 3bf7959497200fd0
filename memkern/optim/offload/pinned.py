"""Pinned memory for many tensors, without the rounding that torch's allocator does for each."""

from __future__ import annotations

import bisect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

SLAB = 2**30  # bytes of a slab at most, unless a tensor has more
UNIT = 512  # bytes to which each tensor is aligned


class Slabs:
    """Host memory for tensors that stay, cut from slabs whose sizes are powers of two.

    torch's allocator of pinned memory rounds each tensor up to a power of two: 170 MiB to 256. So slabs of a GiB, and
    smaller ones for the rest, are allocated when they are needed. Which tensor goes where is planned: the largest
    first, each into the smallest gap that is large enough. What was not planned goes where there is room, or into
    another slab, as large as all before it.

    Args:
        sizes: bytes of the tensors that will come, in any order.
        allocate: makes a slab of so many bytes; by default pinned.
    """

    def __init__(self, sizes: Iterable[int] = (), allocate: Callable[[int], Tensor] | None = None) -> None:
        self._allocate = allocate or _pinned
        self._made: dict[int, Tensor] = {}
        self.slabs: list[int] = []
        """Sizes of the slabs."""
        self._places: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # of tensors by size: slab, offset
        self._gaps: list[tuple[int, int, int]] = []  # sizes with slabs and offsets, the smallest first
        self.plan(sizes)

    def plan(self, sizes: Iterable[int]) -> None:
        """Finds places for tensors that will come."""
        aligned = sorted(map(_aligned, sizes), reverse=True)
        rest = sum(aligned)
        for size in aligned:
            self._places[size].append(self._find(size, rest))
            rest -= size

    def _find(self, size: int, rest: int) -> tuple[int, int]:
        """The slab and the offset of so many bytes. A new slab is for ``rest`` bytes, but a GiB at most."""
        at = bisect.bisect_left(self._gaps, (size, 0, 0))
        if at == len(self._gaps):
            least, most = 1 << (size - 1).bit_length(), 1 << (rest.bit_length() - 1)
            self.slabs.append(max(least, min(SLAB, most)))
            self._gaps.append((self.slabs[-1], len(self.slabs) - 1, 0))
        gap, slab, offset = self._gaps.pop(at)
        bisect.insort(self._gaps, (gap - size, slab, offset + size))
        return slab, offset

    def take(self, nbytes: int) -> Tensor:
        """A tensor of so many bytes, uint8, in a slab."""
        size = _aligned(nbytes)
        places = self._places[size]
        slab, offset = places.pop(0) if places else self._find(size, max(size, sum(self.slabs)))
        if slab not in self._made:
            self._made[slab] = self._allocate(self.slabs[slab])
        return self._made[slab][offset : offset + nbytes]

    def copy_of(self, x: Tensor) -> Tensor:
        """A contiguous copy of a tensor."""
        return self.take(x.nbytes).view(x.dtype).view(x.shape).copy_(x)


def _aligned(size: int) -> int:
    return -(-max(size, 1) // UNIT) * UNIT


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def pinned_if_possible(size: int) -> Tensor:
    """A tensor of so many bytes, uint8; not pinned, with a warning, where the system gives no more pinned memory."""
    try:
        return _pinned(size)
    except RuntimeError as error:
        reason = next(iter(str(error).splitlines()), "")
        warnings.warn(
            f"{size} bytes of the host's memory cannot be pinned ({reason}): copies from and to them are slower, and "
            "overlap nothing; raise the limit of locked memory (ulimit -l, or the container's memlock; under WSL2 "
            "memory in .wslconfig)",
            stacklevel=2,
        )
        return torch.empty(size, dtype=torch.uint8)
