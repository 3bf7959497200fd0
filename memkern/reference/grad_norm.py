"""The global norm of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..quant.layout import FLOATS, is_dense, memory_order
from .state import gradient_factor


def grad_norm_(norm: Tensor, grads: Sequence[Tensor], grad_scale: Tensor | None = None) -> None:
    """norm = sqrt(sum of g^2 over all tensors) / grad_scale, in fp64."""
    if norm.numel() != 1 or norm.dtype != torch.float64:
        raise ValueError(f"norm must be float64 of one element, got {norm.dtype} of shape {tuple(norm.shape)}")
    for i, g in enumerate(grads):
        if g.dtype not in FLOATS:
            raise TypeError(f"grads[{i}] must be float32, bfloat16 or float16, got {g.dtype}")
    factor = gradient_factor(grad_scale)
    dense = [g if is_dense(g.shape, g.stride()) else g.contiguous() for g in grads]
    squares = [memory_order(g).double().square().sum() for g in dense]
    norm.fill_(float(sum(squares, norm.new_zeros(()))) ** 0.5 * factor)
