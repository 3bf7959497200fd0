"""Lion. Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..quant.codec import to_fp32
from ..quant.layout import layout_of
from .blockwise import from_blocks, to_blocks
from .state import Scales, check_tensors, gradient, gradient_factor, load_moment, skipped, store_moment


def sign(x: Tensor) -> Tensor:
    """-1, 0 or 1; NaN stays NaN (torch.sign makes it 0), and so does the sign of zero."""
    return torch.where(x.abs() > 0, torch.copysign(torch.ones_like(x), x), x)


def lion_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor],
    group: Sequence[int],
    lr: Sequence[Tensor],
    beta1: Sequence[float],
    beta2: Sequence[float],
    weight_decay: Sequence[float],
    maximize: Sequence[int],
    codec: Sequence[int],
    block_size: Sequence[int],
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    grad_norm: Tensor | None = None,
    max_grad_norm: float = 0.0,
) -> None:
    """One step for many tensors, in place; lists as in :func:`memkern.reference.adam_step_`."""
    moments = [("exp_avgs", exp_avgs, torch.int8, exp_avg_scales)]
    hyperparameters = (beta1, beta2, weight_decay, maximize)
    check_tensors(params, grads, None, group, lr, hyperparameters, moments, codec, block_size)
    factor = gradient_factor(grad_scale, grad_norm, max_grad_norm)
    if skipped(found_inf):
        return
    scales = Scales(exp_avg_scales)
    for p, g, m8, i in zip(params, grads, exp_avgs, group, strict=True):
        (m_scale,) = scales.next_for(m8)
        layout = layout_of(p, block_size[i])
        rate = float(lr[i])
        x = to_blocks(p, layout) * to_fp32(1.0 - rate * weight_decay[i])
        g = gradient(g, layout, maximize[i], factor)
        m = load_moment(m8, m_scale, layout, codec[i])
        update = sign(to_fp32(beta1[i]) * m + to_fp32(1 - beta1[i]) * g)
        from_blocks(x - to_fp32(rate) * update, layout, p)
        m = to_fp32(beta2[i]) * m + to_fp32(1 - beta2[i]) * g
        store_moment(m, m8, m_scale, layout, codec[i])
