"""Allocates pinned memory for many tensors without rounding each of them up, as torch's allocator does."""

from __future__ import annotations

import bisect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

SLAB = 2**30  # bytes of the largest slab, unless one tensor needs more
UNIT = 512  # bytes, of which each tensor takes a multiple


class Slabs:
    """Host memory for tensors that are never freed, cut from slabs whose sizes are powers of two.

    torch's allocator of pinned memory rounds each tensor up to a power of two: 170 MiB to 256. Here tensors share slabs
    of a GiB, and smaller slabs at the end, each of which is allocated when the first tensor in it is taken. Places are
    planned: the largest tensor first, each in the smallest gap that is large enough. A tensor that was not planned
    takes such a gap, too, or a new slab as large as all slabs before it.

    Args:
        sizes: bytes of the tensors that will come, in any order.
        allocate: returns a slab of so many bytes; by default pinned.
    """

    def __init__(self, sizes: Iterable[int] = (), allocate: Callable[[int], Tensor] | None = None) -> None:
        self._allocate = allocate or _pinned
        self.slabs: list[int] = []  # the sizes of all slabs, allocated or not; a slab's number is its index
        self._allocated: dict[int, Tensor] = {}  # slabs, by number
        self._places: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # planned ones by size: slab, offset
        self._gaps: list[tuple[int, int, int]] = []  # size, slab and offset, the smallest first
        self.plan(sizes)

    def plan(self, sizes: Iterable[int]) -> None:
        """Reserves places for tensors of these sizes, which later calls of :meth:`take` get."""
        aligned = sorted(map(_aligned, sizes), reverse=True)
        remaining = sum(aligned)
        for size in aligned:
            self._places[size].append(self._reserve(size, remaining))
            remaining -= size

    def _reserve(self, size: int, remaining: int) -> tuple[int, int]:
        """Reserves ``size`` bytes; returns their slab and offset. ``remaining``: these bytes and those still to come.

        Where no gap is large enough, it adds a slab of a GiB, or of the largest power of two up to ``remaining``.
        """
        index = bisect.bisect_left(self._gaps, (size, 0, 0))
        if index == len(self._gaps):
            power_above, power_below = 1 << (size - 1).bit_length(), 1 << (remaining.bit_length() - 1)
            self.slabs.append(max(power_above, min(SLAB, power_below)))
            self._gaps.append((self.slabs[-1], len(self.slabs) - 1, 0))
        gap, slab, offset = self._gaps.pop(index)
        bisect.insort(self._gaps, (gap - size, slab, offset + size))
        return slab, offset

    def take(self, nbytes: int) -> Tensor:
        """A tensor of so many bytes, uint8, in a slab."""
        size = _aligned(nbytes)
        places = self._places[size]
        slab, offset = places.pop(0) if places else self._reserve(size, max(size, sum(self.slabs)))
        if slab not in self._allocated:
            self._allocated[slab] = self._allocate(self.slabs[slab])
        return self._allocated[slab][offset : offset + nbytes]

    def copy_of(self, x: Tensor) -> Tensor:
        """A contiguous copy of a tensor."""
        return self.take(x.nbytes).view(x.dtype).view(x.shape).copy_(x)


def _aligned(size: int) -> int:
    """The bytes that a tensor of so many bytes takes."""
    return -(-max(size, 1) // UNIT) * UNIT


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


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
        return torch.empty(size, dtype=torch.uint8, device="cpu")
