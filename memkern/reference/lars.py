"""LARS. Sources: You et al., arXiv 1904.00962, algorithm 1; You, Gitman and Ginsburg, arXiv 1708.03888 (classic)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..quant.codec import to_fp32
from ..quant.layout import layout_of
from .blockwise import from_blocks, to_blocks
from .state import Scales, check_tensors, gradient, gradient_factor, load_moment, skipped, store_moment
from .trust import both_or_one, check_trust, norms, of_blocks


def lars_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor],
    steps: Sequence[Tensor],
    trust_ratios: Sequence[Tensor],
    group: Sequence[int],
    lr: Sequence[Tensor],
    momentum: Sequence[float],
    dampening: Sequence[float],
    weight_decay: Sequence[float],
    nesterov: Sequence[int],
    trust_coeff: Sequence[float],
    eps: Sequence[float],
    trust_clip: Sequence[int],
    always_adapt: Sequence[int],
    layers: Sequence[int],
    maximize: Sequence[int],
    codec: Sequence[int],
    block_size: Sequence[int],
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    grad_norm: Tensor | None = None,
    max_grad_norm: float = 0.0,
) -> None:
    """One step for many tensors, in place; lists as in :func:`memkern.reference.lamb_step_`.

    A ``trust_coeff`` of 0 asks for the paper's form, which has no coefficient; the classic form's is above 0.
    """
    moments = [("exp_avgs", exp_avgs, torch.int8, exp_avg_scales)]
    hyperparameters = (
        momentum,
        dampening,
        weight_decay,
        nesterov,
        trust_coeff,
        eps,
        trust_clip,
        always_adapt,
    )
    check_tensors(
        params, grads, steps, group, lr, (*hyperparameters, layers, maximize), moments, codec, block_size
    )
    check_trust(params, trust_ratios, group, layers, block_size)
    factor = gradient_factor(grad_scale, grad_norm, max_grad_norm)
    if skipped(found_inf):
        return
    scales = Scales(exp_avg_scales)
    for p, g, m8, step_t, ratio, i in zip(params, grads, exp_avgs, steps, trust_ratios, group, strict=True):
        (m_scale,) = scales.next_for(m8)
        layout = layout_of(p, block_size[i])
        step_t += 1
        rate = float(lr[i])
        decay, classic = weight_decay[i], trust_coeff[i] != 0
        adapt = decay != 0 or always_adapt[i] != 0
        x = to_blocks(p, layout)
        g = gradient(g, layout, maximize[i], factor)
        x_norm = norms(x, layout, len(ratio))
        ratio.fill_(1.0)
        if classic and adapt:
            norm = norms(g, layout, len(ratio))
            found = trust_coeff[i] * x_norm / (norm + x_norm * decay + eps[i])
            found = both_or_one(x_norm, norm, found)
            ratio.copy_((found / rate).clamp(max=1.0) if trust_clip[i] else found)
        d = g if to_fp32(decay) == 0 else g + to_fp32(decay) * x
        if classic:
            d = of_blocks(ratio, layout) * d
            # As in torch.optim.SGD, the first step's gradient is not dampened.
            weight = 1.0 if int(step_t) == 1 else 1.0 - dampening[i]
        else:
            weight = 1.0 - momentum[i]
        m = to_fp32(momentum[i]) * load_moment(m8, m_scale, layout, codec[i]) + to_fp32(weight) * d
        if not classic and adapt:
            norm = norms(m, layout, len(ratio))
            ratio.copy_(both_or_one(x_norm, norm, x_norm / norm))
            if trust_clip[i]:
                ratio.clamp_(max=1.0)
        update = d + to_fp32(momentum[i]) * m if nesterov[i] else m
        step = of_blocks(rate * (torch.ones_like(ratio) if classic else ratio).double(), layout)
        from_blocks(x - step * update, layout, p)
        store_moment(m, m8, m_scale, layout, codec[i])
