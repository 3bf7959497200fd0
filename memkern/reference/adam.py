"""Adam and AdamW. Sources: Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101."""

from __future__ import annotations

import math

from torch import Tensor

from ..quant.codec import to_fp32
from ..schemas import ADAM_STEP, StepArgs
from .blockwise import from_blocks, sqrt, to_blocks
from .state import (
    check_step,
    gradient,
    gradient_factor,
    load_moment,
    next_step,
    power_of,
    skipped,
    store_moment,
    tensors_of,
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


def adam_step_(args: StepArgs) -> None:
    """One step for many tensors, in place."""
    check_step(ADAM_STEP, args)
    factor = gradient_factor(args.grad_scale, args.grad_norm, args.max_grad_norm)
    if skipped(args.found_inf):
        return
    for t in tensors_of(ADAM_STEP, args):
        h, (exp_avg, exp_avg_sq), (m_scale, v_scale) = t.h, t.moments, t.scales
        step = next_step(t)
        x = to_blocks(t.param, t.layout)
        g = gradient(t.grad, t.layout, h.maximize, factor)
        if h.decoupled_weight_decay:
            x = x * to_fp32(1.0 - t.lr * h.weight_decay)
        elif (decay := to_fp32(h.weight_decay)) != 0:
            g = g + decay * x
        m = load_moment(exp_avg, m_scale, t.layout, t.codec, h.beta1)
        v = load_moment(exp_avg_sq, v_scale, t.layout, t.codec, h.beta2)
        m, v = adam_moments(m, v, g, h.beta1, h.beta2)
        # m^ / (sqrt(v^) + eps) with both corrections taken out: root2 / bias1 * m / (sqrt(v) + root2 * eps).
        root2, bias1 = adam_corrections(h.beta1, h.beta2, step)
        x = x - to_fp32(t.lr * root2 / bias1) * adam_direction(m, v, h.eps * root2)
        from_blocks(x, t.layout, t.param)
        store_moment(m, exp_avg, m_scale, t.layout, t.codec, step)
        store_moment(v, exp_avg_sq, v_scale, t.layout, t.codec, step)
