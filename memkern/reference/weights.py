"""How a step reads and writes a parameter: the formulas of ``memkern.quant.codec.WEIGHTS``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..quant import codec as C
from ..quant.layout import BlockLayout
from .blockwise import from_blocks, to_blocks, weight_random

DROPPED = {C.WEIGHTS[name]: bits for name, bits in C.WEIGHT_DROPPED_BITS.items()}
"""weight_storage -> how many of fp32's 32 bits are dropped, for the storages that round to a number of bits."""


def bits_of(x: Tensor) -> Tensor:
    """The bits of fp32 values, as int32, in which sums wrap around."""
    return x.view(torch.int32)


def float_of(u: Tensor) -> Tensor:
    return u.view(torch.float32)


def join_weight(p: Tensor, error: Tensor, dropped: int) -> Tensor:
    """fp32 weights from bf16 weights and their stored errors; p itself where the sum would be NaN.

    No step leaves such an error, but p may be edited beside it: 0 and a negative error are the bits of a NaN.
    """
    p = p.float()
    joined = float_of(bits_of(p) + (error.int() << dropped))
    return torch.where(joined.isnan(), p, joined)


def split_weight(x: Tensor, r: Tensor | int, dropped: int) -> tuple[Tensor, Tensor]:
    """Splits fp32 weights into bf16 weights, returned in fp32, and their errors, int32.

    ``r``: random bits, or 2^dropped / 2, which rounds to the nearest. What is not finite stays so and has no error.
    """
    u = (bits_of(x) + r) & ~((1 << dropped) - 1)
    p = (u + 2**15) & ~0xFFFF
    finite = x.isfinite()
    return torch.where(finite, float_of(p), x), torch.where(finite, (u - p) >> dropped, 0)


def load_weight(p: Tensor, state: Tensor | None, storage: int, layout: BlockLayout) -> Tensor:
    """A parameter in blocks: in fp64 if the parameter is, else in fp32."""
    if state is None:
        return to_blocks(p, layout)
    return join_weight(to_blocks(p, layout), to_blocks(state, layout), DROPPED[storage])


def store_weight(x: Tensor, p: Tensor, state: Tensor | None, storage: int, layout: BlockLayout, step: int) -> None:
    """Stores a parameter in place; the inverse of :func:`load_weight`. Random bits are those of ``step``."""
    if storage in DROPPED:
        dropped = DROPPED[storage]
        r = weight_random(layout.block, step, dropped, x.device) if dropped else 0
        x, error = split_weight(x, r, dropped)
        if state is not None:
            from_blocks(error.to(state.dtype), layout, state)
    from_blocks(x, layout, p)
