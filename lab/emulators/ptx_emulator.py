"""Runs PTX, as nvcc and Triton emit it, on the CPU: every thread of a grid at once, in numpy.

Addresses are real ones: kernels get pointers of CPU tensors that were declared to a :class:`Memory`, and every
access is checked against them. Threads that diverge run one side after the other; a barrier or a warp operation that
not all its threads reach at the same instruction raises, and so does an instruction that is not known here.
Approximations (``sqrt.approx``) are off by up to one unit in the last place, up or down, so that kernels which rely on
more fail.

Only what memkern's kernels use of PTX is here: no atomics, textures, products of matrices, or calls.
"""

from __future__ import annotations

import ctypes
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from lab.emulators.ptx_checks import Checks

Array = np.ndarray
SIZES = {  # bytes of a type
    **{f"{kind}{8 * n}": n for kind in "bus" for n in (1, 2, 4, 8)},
    **{"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "f16x2": 4, "bf16x2": 4, "pred": 1},
}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
FLOAT = {2: np.float16, 4: np.float32, 8: np.float64}
WARP = 32


class PtxError(Exception):
    """The PTX does what it must not, or what this emulator does not know."""


# ---- values of a type, from and to the bits of a register


def values(bits: Array, kind: str) -> Array:
    """Values of a type from its bits; bf16 as fp32."""
    n = SIZES[kind]
    bits = bits.astype(UNSIGNED[n], copy=False)
    if kind == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind in ("f16", "f32", "f64"):
        return bits.view(FLOAT[n])
    return bits.view(SIGNED[n]) if kind[0] == "s" else bits


def bits_of(x: Array, kind: str) -> Array:
    """The bits of values of a type; fp32 values are rounded to bf16."""
    n = SIZES[kind]
    if kind == "bf16":
        u = np.ascontiguousarray(x, np.float32).view(np.uint32)
        rounded = (u + np.uint32(0x7FFF) + (u >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
        return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)
    if kind in ("f16", "f32", "f64"):
        return np.ascontiguousarray(x, FLOAT[n]).view(UNSIGNED[n])
    return np.asarray(x).astype(UNSIGNED[n], copy=False)


def is_float(kind: str) -> bool:
    return kind in ("f16", "bf16", "f32", "f64")


def directed(exact: Array, mode: str) -> Array:
    """fp64 to fp32, rounded to nearest (rn), down (rm), up (rp) or to zero (rz)."""
    near = exact.astype(np.float32)
    up, down = near.astype(np.float64) < exact, near.astype(np.float64) > exact
    if mode == "rm" or mode == "rz":
        near = np.where(down & ((mode == "rm") | (exact > 0)), np.nextafter(near, np.float32(-np.inf)), near)
    if mode == "rp" or mode == "rz":
        near = np.where(up & ((mode == "rp") | (exact < 0)), np.nextafter(near, np.float32(np.inf)), near)
    return near


def unit_off(x: Array) -> Array:
    """An approximation: x, or the number above or below it, chosen by a hash of its bits."""
    direction = (x.view(np.uint32) * np.uint32(2654435769) >> np.uint32(30)).astype(np.int64) - 1  # -1 to 2
    neighbour = np.where(direction == 1, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf)))
    return np.where((direction % 2 == 1) & (x > 0) & np.isfinite(x), neighbour, x)


# ---- memory


class Memory:
    """Tensors and arrays that a kernel may touch, at their own addresses."""

    def __init__(self, *tensors: torch.Tensor | Array) -> None:
        self.starts: list[int] = []
        self.buffers: list[Array] = []
        self.kept: list[Any] = []
        for x in tensors:
            self.add(x)

    @classmethod
    def process(cls) -> Memory:
        """All memory that this process may write, for kernels whose buffers are not known: few faults are found."""
        memory = cls()
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            if rights.startswith("rw"):
                start, end = (int(x, 16) for x in span.split("-"))
                memory.starts.append(start)
                memory.buffers.append(np.ctypeslib.as_array((ctypes.c_uint8 * (end - start)).from_address(start)))
        return memory

    def add(self, x: torch.Tensor | Array) -> int:
        """Declares the storage of a tensor, or an array; returns its address."""
        if isinstance(x, torch.Tensor):
            storage = x.untyped_storage()
            start, size = storage.data_ptr(), storage.nbytes()
        else:
            start, size = x.ctypes.data, x.nbytes
        i = bisect_right(self.starts, start)
        if size and not (i and start + size <= self.starts[i - 1] + len(self.buffers[i - 1])):
            self.starts.insert(i, start)
            self.buffers.insert(i, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start)))
        self.kept.append(x)
        return x.data_ptr() if isinstance(x, torch.Tensor) else start

    def find(self, addresses: Array, size: int, what: str) -> list[tuple[Array, Array, Array]]:
        """For each buffer with some of the addresses: which of them (indices), its bytes, their offsets into it."""
        if (addresses % np.uint64(size)).any():
            raise PtxError(f"{what}: an address is not a multiple of {size}")
        buffer_of = np.searchsorted(np.array(self.starts, np.uint64), addresses, "right").astype(np.int64) - 1
        parts = []
        for i in np.unique(buffer_of):
            mine = np.nonzero(buffer_of == i)[0]
            offset = (addresses[mine] - np.uint64(self.starts[i])).astype(np.int64)
            if i < 0 or (offset + size > len(self.buffers[i])).any():
                raise PtxError(f"{what}: address {int(addresses[mine][offset.argmax()]):#x} is outside of all buffers")
            parts.append((mine, self.buffers[i], offset))
        return parts


# ---- programs


class Instruction(NamedTuple):
    guard: tuple[str, bool] | None  # predicate register, and whether it is negated
    op: list[str]
    operands: list[str]
    text: str


@dataclass
class Kernel:
    name: str
    params: dict[str, tuple[int, int]] = field(default_factory=dict)  # name: (offset, size) among all params' bytes
    registers: dict[str, str] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)  # name: offset
    shared_bytes: int = 0
    labels: dict[str, int] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    executed: Counter[str] = field(default_factory=Counter)  # threads by instruction, over all launches


def split(text: str) -> list[str]:
    """Splits operands at commas outside of braces and brackets."""
    return [part.strip() for part in re.findall(r"(?:[^,{\[]|\{[^}]*\}|\[[^\]]*\])+", text) if part.strip()]


def statements(body: str) -> Iterator[str]:
    """Labels and instructions, in order, without the braces of scopes; those of vectors stay."""
    text = ""
    for char in body:
        if char in "{}" and not text.strip():
            continue
        if char == ";" or (char == ":" and re.fullmatch(r"\s*[\w$]+", text)):
            yield " ".join(text.split()) + (":" if char == ":" else "")
            text = ""
        else:
            text += char


DECLARATION = re.compile(
    r"\.(?P<space>shared|global|const)\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<kind>\w+)\s+(?P<name>[\w$]+)"
    r"\s*(?:\[(?P<count>\d*)\])?\s*(?:=\s*\{?(?P<init>[^}]*)\}?)?$"
)


class Module:
    """The kernels of a PTX text, and its constants."""

    def __init__(self, text: str) -> None:
        text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S)
        text = re.sub(r"^\s*\.(loc|file|pragma)\b[^\n]*$", "", text, flags=re.M)
        text = re.sub(r"^\s*\.section\b[^{]*\{.*?^\s*\}", "", text, flags=re.S | re.M)
        self.kernels: dict[str, Kernel] = {}
        self.constants: dict[str, Array] = {}
        self.shared: list[re.Match[str]] = []
        outside, end = "", 0
        for match in re.finditer(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)[^{;]*\{", text):
            outside += text[end : match.start()]
            end, depth = match.end(), 1
            while depth:
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                end += 1
            self.kernels[match[1]] = self._kernel(match[1], match[2], text[match.end() : end - 1])
        for statement in (outside + text[end:]).split(";"):
            self._declare(" ".join(statement.split()), None)
        for kernel in self.kernels.values():
            for declaration in self.shared:
                self._place(kernel, declaration)

    def find(self, *parts: str) -> Kernel:
        """The kernel whose name holds all of the parts."""
        matching = [k for name, k in self.kernels.items() if all(part in name for part in parts)]
        if len(matching) != 1:
            raise KeyError(f"{parts} are in {[k.name for k in matching]} of {[*self.kernels]}")
        return matching[0]

    def _declare(self, statement: str, kernel: Kernel | None) -> None:
        declaration = DECLARATION.search(statement)
        if not declaration:
            return
        if declaration["space"] == "shared":
            if kernel:
                self._place(kernel, declaration)
            else:
                self.shared.append(declaration)
            return
        size = SIZES[declaration["kind"]]
        array = np.zeros(size * int(declaration["count"] or 1), np.uint8)
        for i, item in enumerate(split(declaration["init"] or "")):
            word = literal(item) & (1 << 8 * size) - 1
            array[i * size : (i + 1) * size] = np.frombuffer(word.to_bytes(size, "little"), np.uint8)
        self.constants[declaration["name"]] = array

    @staticmethod
    def _place(kernel: Kernel, declaration: re.Match[str]) -> None:
        align = int(declaration["align"] or SIZES[declaration["kind"]])
        offset = -(-kernel.shared_bytes // align) * align
        kernel.shared[declaration["name"]] = offset
        count = 1 if declaration["count"] is None else int(declaration["count"] or 0)  # none, [n], or [] for extern
        kernel.shared_bytes = offset + SIZES[declaration["kind"]] * count

    def _kernel(self, name: str, params: str, body: str) -> Kernel:
        kernel, offset = Kernel(name), 0
        for param in split(re.sub(r"\.ptr(\s*\.(global|shared))?(\s*\.align\s+\d+)?", "", params)):
            match = re.search(r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?$", param)
            assert match, param
            size = SIZES[match[2]] * int(match[4] or 1)
            align = int(match[1] or SIZES[match[2]])
            offset = -(-offset // align) * align
            kernel.params[match[3]] = (offset, size)
            offset += size
        for statement in statements(body):
            self._statement(kernel, statement)
        return kernel

    def _statement(self, kernel: Kernel, text: str) -> None:
        if text.endswith(":"):
            kernel.labels[text[:-1]] = len(kernel.code)
        elif text.startswith(".reg"):
            kind, names = re.fullmatch(r"\.reg\s*\.(\w+)\s+(.+)", text).groups()  # type: ignore[union-attr]
            for item in split(names):
                numbered = re.fullmatch(r"(.+)<(\d+)>", item)
                for register in [f"{numbered[1]}{i}" for i in range(int(numbered[2]))] if numbered else [item]:
                    kernel.registers[register] = kind
        elif text.startswith("."):
            self._declare(text, kernel)
        else:
            match = re.fullmatch(r"(?:@(!?)(\S+)\s+)?([\w.:]+)\s*(.*)", text)
            if not match:
                raise PtxError(f"cannot read {text!r}")
            guard = (match[2], match[1] == "!") if match[2] else None
            kernel.code.append(Instruction(guard, match[3].split("."), split(match[4]), text))


def literal(text: str) -> int:
    """The bits of a number in PTX's notation."""
    if text[:2] in ("0f", "0F", "0d", "0D"):
        return int(text[2:], 16)
    return int(text.rstrip("U"), 0)


def contracted(module: Module) -> list[str]:
    """Products and sums without a rounding mode, which ptxas may fuse into one operation with a single rounding."""
    modes = {"rn", "rz", "rm", "rp"}
    return sorted(
        {
            i.text
            for kernel in module.kernels.values()
            for i in kernel.code
            if i.op[0] in ("add", "sub", "mul", "fma") and i.op[-1] in ("f32", "f64") and not modes & {*i.op}
        }
    )


def launch(
    module: Module,
    kernel: Kernel,
    blocks: int,
    threads: int,
    params: bytes,
    memory: Memory,
    shared_bytes: int = 0,
    checks: Checks | None = None,
) -> None:
    """Runs a one-dimensional grid. ``params``: all parameters, each at its offset. ``checks``: see ptx_checks."""
    from lab.emulators.ptx_threads import Threads  # here, as ptx_threads imports this file

    if checks:
        checks.begin(threads)
    step = max(1, (1 << 17) // threads)  # blocks at a time, for arrays of at most 131,072 threads
    for first in range(0, blocks, step):
        chunk = np.arange(first, min(first + step, blocks))
        Threads(module, kernel, chunk, blocks, threads, params, memory, shared_bytes, checks).run()


def pack(kernel: Kernel, *arguments: int | float | torch.Tensor) -> bytes:
    """The bytes of scalar parameters; a tensor stands for its address. Missing ones are zeros."""
    raw = bytearray(max(offset + size for offset, size in kernel.params.values()))
    for (offset, size), x in zip(kernel.params.values(), arguments, strict=False):
        number = x.data_ptr() if isinstance(x, torch.Tensor) else x
        if isinstance(number, float):
            raw[offset : offset + size] = np.array(number, FLOAT[size]).tobytes()
        else:
            raw[offset : offset + size] = (int(number) & (1 << 8 * size) - 1).to_bytes(size, "little")
    return bytes(raw)
