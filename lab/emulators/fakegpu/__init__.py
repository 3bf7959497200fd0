"""Runs the CUDA ops without a GPU, called through torch.ops: nvcc's host code, and kernels as PTX in the emulator.

Two made-up devices stand in for CUDA's (cudart.cpp, device.cpp): torch's dispatcher, device guard and current stream,
the ops' tables and launches are real, and each launch runs in lab.emulators.ptx_emulator, which may access the devices'
memory alone. Needs a process of its own, and a Machine before torch: from then on torch believes that CUDA is there.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lab.emulators.ptx_checks import Checks

LAUNCHER = ctypes.CFUNCTYPE(
    ctypes.c_int,  # result: 0, or 1 for an error
    ctypes.c_char_p,  # the kernel's mangled name
    ctypes.c_uint,  # blocks
    ctypes.c_uint,  # threads of a block
    ctypes.POINTER(ctypes.c_void_p),  # addresses of the arguments
    ctypes.c_size_t,  # bytes of shared memory
    ctypes.c_void_p,  # stream
    ctypes.c_int,  # whether the stream is captured
)
MAX_PIECES = 100_000  # of memory


class Launch(NamedTuple):
    """A launch by the host code, with a copy of its arguments."""

    kernel: str  # mangled
    blocks: int
    threads: int
    params: bytes
    shared: int
    stream: int | None


class Piece(NamedTuple):
    """A piece of a device's memory: the result of one allocation."""

    address: int
    size: int
    serial: int  # number of the allocation
    written: int  # 1: the host has written it
    owner: int  # 0: cudaMalloc, 1: torch, 2: torch, in the memory pool of a CUDA graph


class Machine:
    """The made-up devices, their ops in torch.ops.memkern_nvcc, and what was launched."""

    def __init__(self, folder: Path) -> None:
        spec = importlib.util.find_spec("torch")
        assert spec is not None
        assert spec.origin is not None
        lib = Path(spec.origin).parent / "lib"
        for name in ("libc10.so", "libtorch_cpu.so"):
            ctypes.CDLL(str(lib / name), ctypes.RTLD_GLOBAL)
        self.runtime = ctypes.CDLL(str(folder / "libfakecudart.so"), ctypes.RTLD_GLOBAL)
        self.device = ctypes.CDLL(str(folder / "libfakedevice.so"), ctypes.RTLD_GLOBAL)

        import torch

        from lab.emulators.ptx_emulator import Module
        from memkern import schemas

        self.runtime.fakegpu_new_stream.restype = ctypes.c_void_p
        self.runtime.fakegpu_memory.restype = ctypes.c_size_t
        self.library = torch.library.Library("memkern_nvcc", "DEF")
        for name, schema in schemas.SCHEMAS.items():
            self.library.define(name + schema)
        torch.ops.load_library(str(folder / "libops.so"))
        self.ops = torch.ops.memkern_nvcc
        self.module = Module((folder / "ops.ptx").read_text())
        self.launches: list[Launch] = []
        self.graph: list[Launch] = []
        self.runs = True  # False: launches are noted, and do not run
        self.pending: list[Launch] | None = None  # a list: launches are added to it, for a test to run them later
        self.noted: list[str] = []  # the kernel of each launch, whether it ran or not
        self.errors: list[Exception] = []
        self.checks: Checks | None = None  # of all launches
        self.written: dict[int, Any] = {}  # which bytes kernels wrote, by serial, of pieces that the host did not write
        self.given: tuple[int, list[tuple[int, int]]] | None = None  # see restrict_to()
        self._launcher = LAUNCHER(self._launch)  # kept alive, as the runtime calls it
        self.runtime.fakegpu_set_launcher(self._launcher)

    # ---- launches

    def _launch(
        self,
        name: bytes,
        blocks: int,
        threads: int,
        arguments: Any,
        shared: int,
        stream: int | None,
        capturing: int,
    ) -> int:
        try:
            kernel = self.module.kernels[name.decode()]
            params = bytearray(max((offset + size for offset, size in kernel.params.values()), default=0))
            for i, (offset, size) in enumerate(kernel.params.values()):
                params[offset : offset + size] = ctypes.string_at(arguments[i], size)
            self.noted.append(name.decode())
            if not self.runs:
                return 0
            launch = Launch(name.decode(), blocks, threads, bytes(params), shared, stream)
            if capturing:
                self.graph.append(launch)
            elif self.pending is not None:
                self.pending.append(launch)
            else:
                self.run(launch)
        except Exception as error:  # must not reach C++
            self.errors.append(error)
            return 1
        return 0

    def run(self, launch: Launch) -> None:
        from lab.emulators import ptx_emulator

        self.launches.append(launch)
        kernel = self.module.kernels[launch.kernel]
        ptx_emulator.launch(
            self.module,
            kernel,
            launch.blocks,
            launch.threads,
            launch.params,
            self.memory(),
            launch.shared,
            self.checks,
        )

    def pieces(self) -> list[Piece]:
        """The devices' memory."""
        rows = (ctypes.c_uint64 * (5 * MAX_PIECES))()
        count = self.runtime.fakegpu_memory(rows, MAX_PIECES)
        assert count <= MAX_PIECES
        return [Piece(*rows[5 * i : 5 * i + 5]) for i in range(count)]

    def memory(self) -> Any:
        """The devices' memory, without the host's, and of torch's pieces what :meth:`restrict_to` allows."""
        import numpy as np

        from lab.emulators.ptx_emulator import Memory

        memory, pieces = Memory(), self.pieces()
        if self.checks:
            self.checks.unwritten.clear()
        ranges = [(p.address, p.size, p) for p in pieces]
        if self.given is not None:
            first, spans = self.given
            ranges = [(p.address, p.size, p) for p in pieces if not p.owner or p.serial > first]
            homes = [p for p in pieces if p.owner and p.serial <= first]
            for start, size in spans:
                home = next(p for p in homes if p.address <= start and start + size <= p.address + p.size)
                ranges.append((start, size, home))
        for start, size, piece in sorted(ranges):
            if not size:
                continue
            memory.starts.append(start)
            memory.buffers.append(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start)))
            if self.checks and not piece.written:
                written = self.written.setdefault(piece.serial, np.zeros(piece.size, bool))
                self.checks.unwritten[start] = written[start - piece.address :][:size]
        return memory

    def restrict_to(self, tensors: Any) -> None:
        """Lets kernels access these tensors' bytes alone, of all that torch has allocated so far. None lifts this."""
        if tensors is None:
            self.given = None
            return
        ranges: list[tuple[int, int]] = []

        def add_range(t: Any) -> Any:
            last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            if t.is_cuda and t.numel():
                ranges.append((t.data_ptr(), (last + 1) * t.element_size()))
            return t

        self._each(tensors, add_range)
        spans: list[tuple[int, int]] = []
        for start, size in sorted({*ranges}):
            if spans and start < sum(spans[-1]):  # overlaps the last one: both are of one storage
                begin = spans[-1][0]
                spans[-1] = begin, max(sum(spans[-1]), start + size) - begin
            else:
                spans.append((start, size))
        self.given = max((p.serial for p in self.pieces()), default=0), spans

    def replay(self) -> None:
        for launch in self.graph:
            self.run(launch)

    def kernels(self) -> Counter[str]:
        """How often each kernel ran since the last call, by its own name."""
        from lab.emulators.simt_ptx import readable

        names = readable([launch.kernel for launch in self.launches]) if self.launches else []
        self.launches.clear()
        return Counter(name.removeprefix("memkern::").partition("<")[0] for name in names)

    # ---- devices and streams

    def new_stream(self, device: int = 0, blocking: bool = False) -> int:
        return self.runtime.fakegpu_new_stream(device, blocking)

    def replace_stream(self, stream: int) -> None:
        """Destroys a stream and gives its handle to a new one. Launches in the destroyed stream still run."""
        self.runtime.fakegpu_replace_stream(ctypes.c_void_p(stream))

    def use_stream(self, stream: int | None, device: int = 0) -> None:
        """Makes a stream torch's current one of the device; None is the default stream."""
        self.device.fakegpu_use_stream(device, ctypes.c_void_p(stream))

    def capture(self, stream: int, on: bool) -> None:
        self.runtime.fakegpu_capture(ctypes.c_void_p(stream), on)

    def is_capturing(self, stream: int) -> bool:
        return bool(self.runtime.fakegpu_is_capturing(ctypes.c_void_p(stream)))

    def current_device(self) -> int:
        device = ctypes.c_int(-1)
        self.runtime.cudaGetDevice(ctypes.byref(device))
        return device.value

    # ---- tensors

    def to_device(self, x: Any, device: int = 0) -> Any:
        """Copies all tensors in lists, dicts and named tuples to a device, with their strides and offsets."""
        import torch

        return self._each(x, lambda t: torch.ops.fakegpu.to_device(t, device))

    def to_host(self, x: Any) -> Any:
        import torch

        return self._each(x, torch.ops.fakegpu.to_host)

    def _each(self, x: Any, transform: Any) -> Any:
        import torch

        if isinstance(x, torch.Tensor):
            return transform(x)
        if isinstance(x, dict):
            return {key: self._each(value, transform) for key, value in x.items()}
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return type(x)(*(self._each(value, transform) for value in x))
        if isinstance(x, (list, tuple)):
            return [self._each(value, transform) for value in x]
        return x
