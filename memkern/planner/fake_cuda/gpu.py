"""Torch's choices on a GPU, made without one: attention that does not store all scores, autocast, whole operators."""

from __future__ import annotations

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
        found = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
        return found[0]
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
    """Operators that torch runs as several where it has kernels for the CPU alone; on a GPU they allocate no more."""
    library = torch.library.Library("aten", "IMPL", "CUDA")
    for name in ("silu_backward", "mish_backward", "native_channel_shuffle"):
        library.impl(name, _no_kernel)
    return library


_libraries: list[torch.library.Library] = []  # a library unregisters its kernels when it is freed


def patch() -> None:
    """Makes torch choose as on a GPU: attention, and whether there is autocast. For a process of its own.

    Patched rather than by a mode, which is not there in the thread of the backward pass that recomputes checkpoints.
    """
    _libraries.append(_not_decomposed())
    F.scaled_dot_product_attention = attention
    torch.cuda.is_available = lambda: True
    torch.cuda.is_bf16_supported = lambda *args, **kwargs: True
