"""Runs the CUDA ops without a GPU from torch.ops down: host code as nvcc compiles it, kernels as PTX in the emulator.

Two made-up devices stand in for CUDA's (cudart.cpp, device.cpp): torch's dispatcher, device guard and current stream,
the ops' tables and launches are real, and each launch runs in tests.support.ptx_emulator, over the devices' memory
alone. For a process of its own, which loads this before torch: from then on torch believes in CUDA.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

LAUNCHER = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_uint,
    ctypes.c_uint,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_int,
)
MOST_BLOCKS = 100_000  # of memory


class Launch(NamedTuple):
    """What the host code called, with a copy of the arguments as they were then."""

    kernel: str  # mangled
    blocks: int
    threads: int
    params: bytes
    shared: int
    stream: int | None


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

        from memkern import _ops
        from tests.support.ptx_emulator import Module

        self.runtime.fakegpu_new_stream.restype = ctypes.c_void_p
        self.device.fakegpu_memory.restype = ctypes.c_size_t
        self.library = torch.library.Library("memkern_nvcc", "DEF")
        for name, schema in _ops.SCHEMAS.items():
            self.library.define(name + schema)
        torch.ops.load_library(str(folder / "libops.so"))
        self.ops = torch.ops.memkern_nvcc
        self.module = Module((folder / "ops.ptx").read_text())
        self.launches: list[Launch] = []
        self.graph: list[Launch] = []
        self.errors: list[Exception] = []
        self._launcher = LAUNCHER(self._launch)  # as long as the runtime calls it
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
            launch = Launch(name.decode(), blocks, threads, bytes(params), shared, stream)
            if capturing:
                self.graph.append(launch)
            else:
                self.run(launch)
        except Exception as error:  # must not reach C++
            self.errors.append(error)
            return 1
        return 0

    def run(self, launch: Launch) -> None:
        from tests.support import ptx_emulator

        self.launches.append(launch)
        kernel = self.module.kernels[launch.kernel]
        ptx_emulator.launch(
            self.module, kernel, launch.blocks, launch.threads, launch.params, self.memory(), launch.shared
        )

    def memory(self) -> Any:
        """The devices' memory, and nothing of the host's."""
        import numpy as np

        from tests.support.ptx_emulator import Memory

        addresses, sizes = (ctypes.c_uint64 * MOST_BLOCKS)(), (ctypes.c_uint64 * MOST_BLOCKS)()
        count = self.device.fakegpu_memory(addresses, sizes, MOST_BLOCKS)
        assert count <= MOST_BLOCKS
        memory = Memory()
        for address, size in zip(addresses[:count], sizes[:count], strict=True):
            memory.starts.append(address)
            memory.buffers.append(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)))
        return memory

    def replay(self) -> None:
        for launch in self.graph:
            self.run(launch)

    def kernels(self) -> Counter[str]:
        """How often each kernel ran since the last call, by its own name."""
        from tests.support.simt.ptx import readable

        names = readable([launch.kernel for launch in self.launches]) if self.launches else []
        self.launches.clear()
        return Counter(name.removeprefix("memkern::").partition("<")[0] for name in names)

    # ---- devices and streams

    def new_stream(self, device: int = 0, blocking: bool = False) -> int:
        return self.runtime.fakegpu_new_stream(device, blocking)

    def use_stream(self, stream: int | None, device: int = 0) -> None:
        """Makes it torch's current stream of the device; None is the default stream."""
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
        """Copies of all tensors in lists, dicts and named tuples, laid out alike."""
        import torch

        return self._each(x, lambda t: torch.ops.fakegpu.to_device(t, device))

    def to_host(self, x: Any) -> Any:
        import torch

        return self._each(x, torch.ops.fakegpu.to_host)

    def _each(self, x: Any, function: Any) -> Any:
        import torch

        if isinstance(x, torch.Tensor):
            return function(x)
        if isinstance(x, dict):
            return {key: self._each(value, function) for key, value in x.items()}
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return type(x)(*(self._each(value, function) for value in x))
        if isinstance(x, (list, tuple)):
            return [self._each(value, function) for value in x]
        return x
