"""Times block-wise quantization and dequantization beside bitsandbytes' and a copy of the same tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .harness import Case, Contender, Subject

BLOCK = 128  # elements with one scale


def contender(name: str, device: str, size: int, direction: str, prepare: Callable) -> Contender:
    """prepare(x) gives two functions: quantize() -> (codes, scale) and dequantize(codes, scale) -> tensor."""

    def setup() -> Subject:
        torch.manual_seed(0)
        x = torch.randn(size // 4096, 4096, device=device)
        quantize, dequantize = prepare(x)
        codes, scale = quantize()
        step = quantize if direction == "quantize" else lambda: dequantize(codes, scale)
        return Subject(step, lambda: x.nbytes + codes.nbytes + scale.nbytes)

    return Contender(name, setup)


def memkern(codec: str) -> Callable:
    def prepare(x: Tensor) -> tuple[Callable, Callable]:
        from memkern import dequantize_blockwise, quantize_blockwise

        return (
            lambda: quantize_blockwise(x, codec=codec, block_size=BLOCK),
            lambda codes, scale: dequantize_blockwise(codes, scale, codec=codec, block_size=BLOCK),
        )

    return prepare


def bitsandbytes(x: Tensor) -> tuple[Callable, Callable]:
    from bitsandbytes.functional import create_dynamic_map, dequantize_blockwise, quantize_blockwise

    code = create_dynamic_map().to(x.device)

    def quantize() -> tuple[Tensor, Tensor]:
        codes, state = quantize_blockwise(x, code=code, blocksize=BLOCK)
        return codes, state.absmax

    return quantize, lambda codes, scale: dequantize_blockwise(codes, absmax=scale, code=code, blocksize=BLOCK)


def copy(x: Tensor) -> tuple[Callable, Callable]:
    target = torch.empty_like(x)
    return lambda: (target.copy_(x), x.new_empty(0)), lambda codes, scale: target.copy_(x)


def cases(size: int, device: str) -> list[Case]:
    contenders = {
        "memkern power": memkern("power"),
        "memkern dynamic": memkern("dynamic"),
        "bitsandbytes dynamic": bitsandbytes,
        "torch copy": copy,
    }
    numel = size // 4096 * 4096
    return [
        Case(direction, numel, [contender(n, device, size, direction, p) for n, p in contenders.items()])
        for direction in ("quantize", "dequantize")
    ]
