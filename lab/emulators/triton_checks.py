"""Checks every access of Triton's kernels in the PTX emulator, as compute-sanitizer does on a GPU.

A launch may access the bytes of its op's tensors and of its own arguments, and nothing else. Tensors that the op has
allocated count as not written, but for the tables, which the host fills. See lab/emulators/ptx_checks.py.
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

FILLED = ("table", "tables")  # names of kernels' arguments that the host writes


def tensors_in(x: Any) -> list[torch.Tensor]:
    """The tensors with elements in nested lists and tuples."""
    if isinstance(x, torch.Tensor):
        return [x] if x.numel() else []
    if isinstance(x, (list, tuple)):
        return [t for item in x for t in tensors_in(item)]
    return []


def span_of(x: torch.Tensor) -> tuple[int, int]:
    """The address of the first byte, and the number of bytes to the end of the last element."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), (last + 1) * x.element_size()


def joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins spans that overlap, as those of tensors of one storage may."""
    union: list[tuple[int, int]] = []
    for start, size in sorted({*spans}):
        if union and start < sum(union[-1]):
            begin = union[-1][0]
            union[-1] = begin, max(sum(union[-1]), start + size) - begin
        else:
            union.append((start, size))
    return union


class Watch:
    """Watches the launches of an op. May plant a fault: ``change`` edits the PTX of ``kernel``; None leaves it out."""

    def __init__(
        self, order: str, kernel: str = "", change: Callable[[str], str] | None = None, spoil: bool = True
    ) -> None:
        self.checks = Checks(order, spoil=spoil, same_values=True)
        self.kernel, self.change = kernel, change
        self.changed = not kernel  # whether the fault is planted
        self.ran: set[str] = set()
        self.given: list[tuple[int, int]] = []  # spans of the op's tensors
        self.written: dict[tuple[int, int], Array] = {}  # which bytes of the op's own allocations, by span

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
        """The memory that a launch with these arguments may access."""
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
    """Adds the copies that an op makes with torch to its tensors: a launch finds them by addresses in a table."""

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
    """Ops of memkern.triton, each of which may access its arguments alone."""

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

# PTX, and patterns of it. FEW has threads 0 to 6 do ACTION.
FEW = "{ .reg .pred %few; .reg .b32 %me; mov.u32 %me, %tid.x; setp.lt.u32 %few, %me, 7; @%few ACTION; }\n"
BARRIER = r"bar(?:rier)?\.sync\s+(?:\S+\s+)?0;"
SHUFFLE = r"shfl\.sync\.bfly"
WIDE_LOAD = r"(ld\.global\S*\.v4\S*\s+[^;]*\[\s*%\w+) \+ 0(\s*\])"
STORE = r"(st\.global\S*\s+\[\s*%\w+) \+ 0(\s*\])"


def edit(pattern: str, new: str, index: int | None = 0) -> Callable[[str], str]:
    """A change of PTX: replaces match number ``index``, or with None each."""

    def change(text: str) -> str:
        if index is None:
            return re.sub(pattern, new, text)
        matches = [*re.finditer(pattern, text)]
        if len(matches) <= index:
            return text
        m = matches[index]
        return text[: m.start()] + m.expand(new) + text[m.end() :]

    return change
