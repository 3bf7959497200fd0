"""Patches that make torch and Inductor choose what they choose on a GPU: attention's kernel, autocast, which operators
are decomposed. Only for a process with fake CUDA."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention: flash attention in half precision without a mask, else the memory-efficient one."""
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (x.to(torch.get_autocast_dtype("cuda")) for x in (query, key, value))
    aten = torch.ops.aten
    flash = attn_mask is None and query.dtype != torch.float32
    if enable_gqa and not flash:  # flash attention reads the heads of keys and values that there are
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    if flash:
        outputs = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
        return outputs[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = zeros.masked_fill(attn_mask.logical_not(), float("-inf"))
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]


def _no_kernel(*_: object) -> None:
    raise NotImplementedError("fake tensors compute nothing")


def _not_decomposed() -> torch.library.Library:
    """Registers kernels for operators that torch decomposes where it has none for CUDA. Returns their library."""
    library = torch.library.Library("aten", "IMPL", "CUDA")
    for name in ("silu_backward", "mish_backward", "native_channel_shuffle"):
        library.impl(name, _no_kernel)
    return library


_libraries: list[torch.library.Library] = []  # a library unregisters its kernels when it is freed


def patch() -> None:
    """Makes torch choose as on a GPU: attention, and whether there is autocast. For a process of its own.

    A torch function mode would not reach the thread of the backward pass, which runs checkpointed blocks again.
    """
    _libraries.append(_not_decomposed())
    F.scaled_dot_product_attention = attention
    torch.cuda.is_available = lambda: True
    torch.cuda.is_bf16_supported = lambda *args, **kwargs: True


A100 = types.SimpleNamespace(
    name="fake", major=8, minor=0, gcnArchName="", multi_processor_count=108, warp_size=32,
    max_threads_per_block=1024, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
    shared_memory_per_block=49152, shared_memory_per_block_optin=166912, shared_memory_per_multiprocessor=167936,
    total_memory=80 * 2**30, L2_cache_size=40 * 2**20,
)  # fmt: skip
"""The properties of the GPU that Inductor sees. They decide on the kernels' tiles, not on buffers."""


@contextlib.contextmanager
def inductor_sees(gpu: Any = A100) -> Iterator[None]:
    """A ``with`` block in which Inductor compiles graphs of fake CUDA tensors as for this GPU."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import scheduler
    from torch.cuda.amp import common
    from torch.utils import _triton

    def returns(value: Any) -> Any:
        return lambda *args, **kwargs: value

    with contextlib.ExitStack() as stack:

        def replace(owner: Any, **replacements: Any) -> None:
            for name, value in replacements.items():
                stack.enter_context(mock.patch.object(owner, name, value, create=True))

        properties, zero, nothing = returns(gpu), returns(0), returns(None)
        capability, number = returns((gpu.major, gpu.minor)), returns(10 * gpu.major + gpu.minor)
        replace(torch.cuda, get_device_properties=properties, set_device=nothing)
        # With True, dynamo and AOTAutograd would save and restore the device's random state. Autocast asks elsewhere.
        replace(torch.cuda, is_available=returns(False))
        replace(common, amp_definitely_not_available=returns(False))
        replace(torch.cuda, get_device_capability=capability, current_device=zero, device_count=returns(1))
        replace(torch.cuda, synchronize=nothing, _DeviceGuard=returns(contextlib.nullcontext()))
        replace(torch._C, _cuda_getCurrentRawStream=zero)
        for owner in (CudaInterface, CudaInterface.Worker):
            replace(owner, get_device_properties=staticmethod(properties), current_device=staticmethod(zero))
        replace(CudaInterface, get_compute_capability=staticmethod(number), get_raw_stream=staticmethod(zero))
        replace(CudaInterface, is_triton_capable=staticmethod(returns(True)))
        replace(CudaInterface, raise_if_triton_unavailable=staticmethod(nothing))
        replace(scheduler, has_triton=returns(True))
        replace(_triton, triton_hash_with_backend=returns(""))
        yield
