"""Adam and AdamW. Sources: Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..quant.codec import to_fp32
from ..quant.layout import layout_of
from .blockwise import from_blocks, sqrt, to_blocks
from .state import (
    Scales,
    check_tensors,
    gradient,
    gradient_factor,
    load_moment,
    power_of,
    skipped,
    store_moment,
)


def adam_moments(m: Tensor, v: Tensor, g: Tensor, beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
    """m = m + (1 - beta1) g; v = v + (1 - beta2) g g, of moments that come in decayed: times beta1 and beta2."""
    return m + to_fp32(1 - beta1) * g, v + (to_fp32(1 - beta2) * g) * g


def adam_direction(m: Tensor, v: Tensor, eps: float) -> Tensor:
    """m / (sqrt(v) + eps)."""
    return m / (sqrt(v) + to_fp32(eps))


def adam_corrections(beta1: float, beta2: float, step: int) -> tuple[float, float]:
    """sqrt(1 - beta2^step) and 1 - beta1^step."""
    return math.sqrt(1.0 - power_of(beta2, step)), 1.0 - power_of(beta1, step)


def adam_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor],
    exp_avg_sq_scales: Sequence[Tensor],
    steps: Sequence[Tensor],
    group: Sequence[int],
    lr: Sequence[Tensor],
    beta1: Sequence[float],
    beta2: Sequence[float],
    eps: Sequence[float],
    weight_decay: Sequence[float],
    decoupled: Sequence[int],
    maximize: Sequence[int],
    codec: Sequence[int],
    block_size: Sequence[int],
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    grad_norm: Tensor | None = None,
    max_grad_norm: float = 0.0,
) -> None:
    """One step for many tensors, in place.

    Lists run over tensors down to ``group``, which numbers the hyperparameters that follow, one entry per group.
    ``exp_avg_scales`` and ``exp_avg_sq_scales`` have an entry for each tensor whose state is codes, in order.
    """
    moments = [
        ("exp_avgs", exp_avgs, torch.int8, exp_avg_scales),
        ("exp_avg_sqs", exp_avg_sqs, torch.uint8, exp_avg_sq_scales),
    ]
    hyperparameters = (beta1, beta2, eps, weight_decay, decoupled, maximize)
    check_tensors(params, grads, steps, group, lr, hyperparameters, moments, codec, block_size)
    factor = gradient_factor(grad_scale, grad_norm, max_grad_norm)
    if skipped(found_inf):
        return
    scales = Scales(exp_avg_scales, exp_avg_sq_scales)
    for p, g, m8, v8, step_t, i in zip(params, grads, exp_avgs, exp_avg_sqs, steps, group, strict=True):
        m_scale, v_scale = scales.next_for(m8, v8)
        layout = layout_of(p, block_size[i])
        step_t += 1
        step = int(step_t)
        rate = float(lr[i])
        x = to_blocks(p, layout)
        g = gradient(g, layout, maximize[i], factor)
        if decoupled[i]:
            x = x * to_fp32(1.0 - rate * weight_decay[i])
        elif (decay := to_fp32(weight_decay[i])) != 0:
            g = g + decay * x
        m = load_moment(m8, m_scale, layout, codec[i], beta1[i])
        v = load_moment(v8, v_scale, layout, codec[i], beta2[i])
        m, v = adam_moments(m, v, g, beta1[i], beta2[i])
        # m^ / (sqrt(v^) + eps) with both corrections taken out: root2 / bias1 * m / (sqrt(v) + root2 * eps).
        root2, bias1 = adam_corrections(beta1[i], beta2[i], step)
        x = x - to_fp32(rate * root2 / bias1) * adam_direction(m, v, eps[i] * root2)
        from_blocks(x, layout, p)
        store_moment(m, m8, m_scale, layout, codec[i])
        store_moment(v, v8, v_scale, layout, codec[i], step)
