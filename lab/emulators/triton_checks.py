"""Triton's kernels in the PTX emulator with every access watched, as compute-sanitizer does on a GPU.

A launch may touch the bytes of its op's tensors and those of its own arguments, and nothing else. What the op allocated
has been written by nobody, but for the tables, which the host fills. See lab/emulators/ptx_checks.py.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lab.emulators.ptx_checks import Checks
from lab.emulators.ptx_emulator import Array, Memory

FILLED = ("table", "tables")  # arguments of kernels that the host writes


def tensors_in(x: Any) -> list[torch.Tensor]:
    """Those in nested lists and tuples that have elements."""
    if isinstance(x, torch.Tensor):
        return [x] if x.numel() else []
    if isinstance(x, (list, tuple)):
        return [t for item in x for t in tensors_in(item)]
    return []


def span_of(x: torch.Tensor) -> tuple[int, int]:
    """The first byte and the number of bytes to the end of the last element."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), (last + 1) * x.element_size()


def joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without overlaps: tensors of one storage may have bytes in common."""
    found: list[tuple[int, int]] = []
    for start, size in sorted({*spans}):
        if found and start < sum(found[-1]):
            begin = found[-1][0]
            found[-1] = begin, max(sum(found[-1]), start + size) - begin
        else:
            found.append((start, size))
    return found


class Watch:
    """What launches may touch, and a fault that is planted: ``change`` of a kernel's PTX, or a kernel left out."""

    def __init__(
        self, order: str, kernel: str = "", change: Callable[[str], str] | None = None, spoil: bool = True
    ) -> None:
        self.checks = Checks(order, spoil=spoil, same_values=True)
        self.kernel, self.change = kernel, change
        self.changed = not kernel
        self.ran: set[str] = set()
        self.given: list[tuple[int, int]] = []
        self.written: dict[tuple[int, int], Array] = {}  # of what the op has allocated, by its span

    def edited(self, name: str, text: str) -> str:
        if self.change is None or name != self.kernel:
            return text
        text, before = self.change(text), text
        self.changed = self.changed or text != before
        return text

    def leaves_out(self, name: str) -> bool:
        self.ran.add(name)
        left_out = self.change is None and name == self.kernel
        self.changed = self.changed or left_out
        return left_out

    def memory(self, arguments: dict[str, Any]) -> Memory:
        filled = [span_of(x) for name, x in arguments.items() if name in FILLED and tensors_in(x)]
        own = [span_of(t) for x in arguments.values() for t in tensors_in(x)]
        memory, unwritten = Memory(), self.checks.unwritten
        unwritten.clear()
        known = joined([*self.given, *filled])
        for start, size in joined([*known, *own]):
            memory.starts.append(start)
            memory.buffers.append(bytes_at(start, size))
            if not any(a < start + size and start < a + n for a, n in known):
                unwritten[start] = self.written.setdefault((start, size), np.zeros(size, bool))
        return memory


def bytes_at(start: int, size: int) -> Array:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))


class Copies(TorchDispatchMode):
    """Notes the memory of the copies that an op has torch make, whose addresses no launch's arguments show."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default:
            self.watch.given.append(span_of(result))
        return result


class WatchedOps:
    """The ops of memkern.triton, or a wrapper's, each of which may touch its arguments alone."""

    def __init__(self, ops: Any, watch: Watch) -> None:
        self.ops, self.watch = ops, watch

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.watch.given = [span_of(t) for t in tensors_in(args)]
            self.watch.written.clear()
            try:
                with Copies(self.watch):
                    return getattr(self.ops, name)(*args)
            finally:
                self.watch.given = []

        return call


# ---- planted faults

FEW = "{ .reg .pred %few; .reg .b32 %me; mov.u32 %me, %tid.x; setp.lt.u32 %few, %me, 7; @%few ACTION; }\n"
BARRIER = r"bar(?:rier)?\.sync\s+(?:\S+\s+)?0;"
SHUFFLE = r"shfl\.sync\.bfly"
WIDE_LOAD = r"(ld\.global\S*\.v4\S*\s+[^;]*\[\s*%\w+) \+ 0(\s*\])"
STORE = r"(st\.global\S*\s+\[\s*%\w+) \+ 0(\s*\])"


def nth(pattern: str, new: str, which: int | None = 0) -> Callable[[str], str]:
    """Replaces the (which + 1)-th match, or each."""

    def change(text: str) -> str:
        if which is None:
            return re.sub(pattern, new, text)
        found = [*re.finditer(pattern, text)]
        if len(found) <= which:
            return text
        m = found[which]
        return text[: m.start()] + m.expand(new) + text[m.end() :]

    return change
