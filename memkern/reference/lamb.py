"""LAMB. Source: You et al., "Large Batch Optimization for Deep Learning" (arXiv 1904.00962), algorithm 2."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..quant.codec import to_fp32
from ..quant.layout import layout_of
from .adam import adam_corrections, adam_direction, adam_moments
from .blockwise import from_blocks, to_blocks
from .state import (
    Scales,
    check_tensors,
    gradient,
    gradient_factor,
    load_moment,
    skipped,
    store_moment,
)
from .trust import both_or_one, check_trust, norms, of_blocks


def lamb_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor],
    exp_avg_sq_scales: Sequence[Tensor],
    steps: Sequence[Tensor],
    trust_ratios: Sequence[Tensor],
    group: Sequence[int],
    lr: Sequence[Tensor],
    beta1: Sequence[float],
    beta2: Sequence[float],
    eps: Sequence[float],
    weight_decay: Sequence[float],
    decoupled: Sequence[int],
    bias_correction: Sequence[int],
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
    """One step for many tensors, in place; lists as in :func:`memkern.reference.adam_step_`.

    ``trust_ratios[i]`` gets the ratio of each layer of tensor i, fp32 of shape (layers of the tensor,).
    """
    moments = [
        ("exp_avgs", exp_avgs, torch.int8, exp_avg_scales),
        ("exp_avg_sqs", exp_avg_sqs, torch.uint8, exp_avg_sq_scales),
    ]
    hyperparameters = (beta1, beta2, eps, weight_decay, decoupled, bias_correction, trust_clip, always_adapt)
    check_tensors(
        params, grads, steps, group, lr, (*hyperparameters, layers, maximize), moments, codec, block_size
    )
    check_trust(params, trust_ratios, group, layers, block_size)
    factor = gradient_factor(grad_scale, grad_norm, max_grad_norm)
    if skipped(found_inf):
        return
    scales = Scales(exp_avg_scales, exp_avg_sq_scales)
    for p, g, m8, v8, step_t, ratio, i in zip(
        params, grads, exp_avgs, exp_avg_sqs, steps, trust_ratios, group, strict=True
    ):
        m_scale, v_scale = scales.next_for(m8, v8)
        layout = layout_of(p, block_size[i])
        step_t += 1
        step = int(step_t)
        rate = float(lr[i])
        x = to_blocks(p, layout)
        g = gradient(g, layout, maximize[i], factor)
        if decoupled[i]:
            x = x * to_fp32(1.0 - rate * weight_decay[i])
        m = load_moment(m8, m_scale, layout, codec[i], beta1[i])
        v = load_moment(v8, v_scale, layout, codec[i], beta2[i])
        m, v = adam_moments(m, v, g, beta1[i], beta2[i])
        # m^ / (sqrt(v^) + eps), as Adam has it, but with its true scale, which the norm needs.
        root2, bias1 = adam_corrections(beta1[i], beta2[i], step) if bias_correction[i] else (1.0, 1.0)
        update = to_fp32(root2 / bias1) * adam_direction(m, v, eps[i] * root2)
        if not decoupled[i] and (decay := to_fp32(weight_decay[i])) != 0:
            update = update + decay * x
        ratio.fill_(1.0)
        if weight_decay[i] != 0 or always_adapt[i]:
            x_norm, norm = norms(x, layout, len(ratio)), norms(update, layout, len(ratio))
            ratio.copy_(both_or_one(x_norm, norm, x_norm / norm))
            if trust_clip[i]:
                ratio.clamp_(max=1.0)
        x = x - of_blocks(rate * ratio.double(), layout) * update
        from_blocks(x, layout, p)
        store_moment(m, m8, m_scale, layout, codec[i])
        store_moment(v, v8, v_scale, layout, codec[i], step)
