"""Times forward and backward passes of activations beside torch's own, and counts the bytes that they save.

The ops behind memkern.functional are few_bit_encode, few_bit_forward, few_bit_backward and
few_bit_backward_from_output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memkern.memory import saved_bytes

from .harness import Case, Contender, Subject

# Tensors of x's size that a forward and a backward pass must read or write besides what is saved: x, y, dy and dx.
PASSES = 4


def contender(name: str, fn: Callable[[Tensor], Tensor], size: int, device: str, dtype: torch.dtype) -> Contender:
    def setup() -> Subject:
        torch.manual_seed(0)
        x = torch.randn(size, device=device).to(dtype).requires_grad_()
        grad = torch.randn(size, device=device).to(dtype)
        saved = saved_bytes(lambda: fn(x))
        # Codes are written, and all that is saved is read. The remainder is 0 where x or y itself is saved.
        codes = saved % x.nbytes
        moved = PASSES * x.nbytes + saved + codes
        return Subject(lambda: torch.autograd.grad(fn(x), x, grad), lambda: moved, lambda: saved)

    return Contender(name, setup)


def gelus(approximate: str) -> dict[str, Callable[[Tensor], Tensor]]:
    from memkern import functional

    def ours(**options: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: functional.gelu(x, approximate, **options)

    return {
        "memkern GELU, 3 bits": ours(bits=3),
        "memkern GELU, 4 bits": ours(bits=4),
        "memkern GELU, from the output": ours(keep="output"),
        "torch GELU": lambda x: F.gelu(x, approximate=approximate),
    }


def silus() -> dict[str, Callable[[Tensor], Tensor]]:
    from memkern import functional

    return {
        "memkern SiLU, 3 bits": lambda x: functional.silu(x, bits=3),
        "memkern SiLU, from the output": lambda x: functional.silu(x, keep="output"),
        "torch SiLU": F.silu,
    }


def cases(size: int, device: str) -> list[Case]:
    def case(name: str, fns: dict[str, Callable[[Tensor], Tensor]], n: int, dtype: torch.dtype) -> Case:
        return Case(name, n, [contender(title, fn, n, device, dtype) for title, fn in fns.items()])

    small = min(size, 2**18)  # 1 MiB: fits the caches, and malloc reuses memory of that size
    return [
        case("GELU, fp32", gelus("none"), size, torch.float32),
        case("tanh-GELU, fp32", gelus("tanh"), size, torch.float32),
        case("GELU, bf16", gelus("none"), size, torch.bfloat16),
        case("tanh-GELU, bf16", gelus("tanh"), size, torch.bfloat16),
        case("SiLU, fp32", silus(), size, torch.float32),
        case("GELU, fp32, small", gelus("none"), small, torch.float32),
        case("GELU, bf16, small", gelus("none"), small, torch.bfloat16),
    ]
