"""What C++ leaves to torch on the CPU: the forward pass of an activation, which must give torch's own bits.

On a part of a tensor torch's operations give other bits than on the whole: no kernel of ours can stand for them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import backend
from .quant.codec import ACTIVATIONS, HUGE_PAGES_FROM
from .reference.activation import activate, check_function

aten = torch.ops.aten
_INTO: dict[str, Callable[[Tensor, float, float, Tensor], Any]] = {
    "gelu": lambda x, a, b, y: aten.gelu.out(x, out=y),
    "gelu_tanh": lambda x, a, b, y: aten.gelu.out(x, approximate="tanh", out=y),
    "silu": lambda x, a, b, y: aten.silu.out(x, out=y),
    "tanh": lambda x, a, b, y: aten.tanh.out(x, out=y),
    "sigmoid": lambda x, a, b, y: aten.sigmoid.out(x, out=y),
    "softplus": lambda x, a, b, y: aten.softplus.out(x, a, b, out=y),
    "mish": lambda x, a, b, y: aten.mish.out(x, out=y),
    "hardswish": lambda x, a, b, y: aten.hardswish.out(x, out=y),
    "leaky_relu": lambda x, a, b, y: aten.leaky_relu.out(x, a, out=y),
    "hardtanh": lambda x, a, b, y: aten.hardtanh.out(x, a, b, out=y),
}
"""The same operations, writing into a tensor; torch has no such form of the others that would save anything."""
_INTO_BY_NUMBER = [_INTO.get(name) for name in ACTIVATIONS]


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(backend.LIBRARY))


@torch.no_grad()
def few_bit_forward(x: Tensor, fn: int, a: float, b: float, *table: Any) -> tuple[Tensor, Tensor]:
    check_function(fn)
    into = _INTO_BY_NUMBER[fn]
    if into is None or x.nbytes < HUGE_PAGES_FROM:
        y = activate(x, fn, a, b)
    else:
        y = torch.empty_like(x)
        _library().memkern_use_huge_pages(ctypes.c_void_p(y.data_ptr()), ctypes.c_size_t(y.nbytes))
        into(x, a, b, y)
    return y, torch.ops.memkern.few_bit_encode.default(x, *table)
