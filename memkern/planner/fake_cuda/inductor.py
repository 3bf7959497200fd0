"""What Inductor asks of a GPU and of Triton, answered without them. For a process with fake CUDA alone."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

A100 = types.SimpleNamespace(
    name="fake", major=8, minor=0, gcnArchName="", multi_processor_count=108, warp_size=32,
    max_threads_per_block=1024, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
    shared_memory_per_block=49152, shared_memory_per_block_optin=166912, shared_memory_per_multiprocessor=167936,
    total_memory=80 * 2**30, L2_cache_size=40 * 2**20,
)  # fmt: skip
"""A GPU's properties: they decide on tiles of kernels, not on buffers."""


@contextlib.contextmanager
def answers(gpu: Any = A100) -> Iterator[None]:
    """Inductor makes graphs for fake CUDA tensors in it."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import scheduler
    from torch.cuda.amp import common
    from torch.utils import _triton

    def answer(what: Any) -> Any:
        return lambda *args, **kwargs: what

    with contextlib.ExitStack() as stack:

        def patch(owner: Any, **answered: Any) -> None:
            for name, what in answered.items():
                stack.enter_context(mock.patch.object(owner, name, what, create=True))

        properties, zero, nothing = answer(gpu), answer(0), answer(None)
        capability, number = answer((gpu.major, gpu.minor)), answer(10 * gpu.major + gpu.minor)
        patch(torch.cuda, get_device_properties=properties, set_device=nothing)
        # Else dynamo and AOTAutograd would save and restore the device's state of random numbers. Autocast asks, too.
        patch(torch.cuda, is_available=answer(False))
        patch(common, amp_definitely_not_available=answer(False))
        patch(torch.cuda, get_device_capability=capability, current_device=zero, device_count=answer(1))
        patch(torch.cuda, synchronize=nothing, _DeviceGuard=answer(contextlib.nullcontext()))
        patch(torch._C, _cuda_getCurrentRawStream=zero)
        for owner in (CudaInterface, CudaInterface.Worker):
            patch(owner, get_device_properties=staticmethod(properties), current_device=staticmethod(zero))
        patch(CudaInterface, get_compute_capability=staticmethod(number), get_raw_stream=staticmethod(zero))
        patch(CudaInterface, is_triton_capable=staticmethod(answer(True)))
        patch(CudaInterface, raise_if_triton_unavailable=staticmethod(nothing))
        patch(scheduler, has_triton=answer(True))
        patch(_triton, triton_hash_with_backend=answer(""))
        yield
