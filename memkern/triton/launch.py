"""How kernels are launched: options, sizes of tiles, device guards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")

# No contraction of a multiplication and an addition into an fma, so that every backend gives the same bits. One stage
# of the loops over tiles: with 3 a tile is copied to shared memory (cp.async) while another is computed, for a tenth
# more instructions, and with 2 each copy is waited for at once (docs/gpu-checks.md).
OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
TILE = 2048 if torch.version.hip else 1024
"""Elements of a tile: 8 for each thread. With 16, Adam's kernel takes 150 to 200 registers instead of 90 to 125."""

TILES = 8
"""Tiles that a program of a step works on, one after the other."""
NORM_TILES = 16
"""The same of norm_tiles, which reads one array alone."""


def rows_of(block: int) -> int:
    """Blocks of a tile."""
    return max(1, TILE // block)


def options_of(block: int) -> dict[str, Any]:
    """Launch options; a block larger than TILE is a tile of its own, with more warps in proportion."""
    return OPTIONS | {"num_warps": OPTIONS["num_warps"] * max(1, block // TILE)}


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def address_of(x: torch.Tensor, name: str) -> int:
    """The address of a tensor's elements. Raises where its storage was resized to nothing, as FSDP does for memory."""
    address = x.data_ptr()
    if not address and x.numel():
        raise RuntimeError(f"{name} has no memory: its storage has been freed")
    return address


def guard(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes ``device`` the current one: Triton launches there, on its current stream."""
    if device.type == "cuda":  # ROCm's devices are called cuda as well
        return torch.cuda.device(device)
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.get_device_module(device.type).device(device)


def is_remote(device: torch.device) -> bool:
    """Whether the device has memory of its own (False in the interpreter, whose tensors are on the CPU)."""
    return device.type != "cpu"


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> int:
    """The current stream of the current device, as a number."""
    if device.type == "cuda":
        return torch.cuda.current_stream().cuda_stream
    if device.type == "cpu":
        return 0
    return torch.get_device_module(device.type).current_stream().stream_id


def event_of(device: torch.device) -> torch.Event | None:
    """An event of a stream of the device; the interpreter has no streams."""
    return torch.Event(device) if is_remote(device) else None


def allocate_outside_of_graphs(make: Callable[[], T], device: torch.device) -> T:
    """Calls ``make``, whose tensors stay from step to step, in a thread of its own, on the current stream.

    While torch.compile warms up for a CUDA graph, torch's allocator serves the thread that does so from the graph's
    memory pool, in which nothing may be left afterwards but the graph's outputs.
    """
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def in_another_thread() -> T:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(in_another_thread).result()
