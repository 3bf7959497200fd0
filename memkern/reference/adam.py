"""Adam and AdamW. Sources: Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..schemas import ADAM_STEP, AMSGRAD_STEP, StepArgs, StepOp
from .blockwise import number, sqrt
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
    """m = m + (1 - beta1) g; v = v + (1 - beta2) g g, of moments that are already times beta1 and beta2."""
    return m + number(1 - beta1, g) * g, v + (number(1 - beta2, g) * g) * g


def adam_direction(m: Tensor, v: Tensor, eps: float) -> Tensor:
    """m / (sqrt(v) + eps)."""
    return m / (sqrt(v) + number(eps, m))


def adam_corrections(beta1: float, beta2: float, step: int) -> tuple[float, float]:
    """sqrt(1 - beta2^step) and 1 - beta1^step."""
    return math.sqrt(1.0 - power_of(beta2, step)), 1.0 - power_of(beta1, step)


def adam_step_(args: StepArgs) -> None:
    """One step for many tensors, in place."""
    _step(ADAM_STEP, args)


def amsgrad_step_(args: StepArgs) -> None:
    """Adam's step with the largest v so far for v: Reddi et al., "On the Convergence of Adam" (arXiv 1904.09237)."""
    _step(AMSGRAD_STEP, args)


def _step(op: StepOp, args: StepArgs) -> None:
    check_step(op, args)
    factor = gradient_factor(args.grad_scale, args.grad_norm, args.max_grad_norm)
    if skipped(args.found_inf):
        return
    for t in tensors_of(op, args):
        h, (exp_avg, exp_avg_sq, *amsgrad), (m_scale, v_scale, *_) = t.h, t.moments, t.scales
        step = next_step(t)
        x = t.load_param()
        g = gradient(t.grad, t.layout, h.maximize, factor)
        if h.decoupled_weight_decay:
            x = x * number(1.0 - t.lr * h.weight_decay, x)
        elif (decay := number(h.weight_decay, x)) != 0:
            g = g + decay * x
        m = load_moment(exp_avg, m_scale, t.layout, t.codec, h.beta1)
        v = load_moment(exp_avg_sq, v_scale, t.layout, t.codec, h.beta2)
        m, v = adam_moments(m, v, g, h.beta1, h.beta2)
        # m^ / (sqrt(v^) + eps) with both corrections taken out: root2 / bias1 * m / (sqrt(v) + root2 * eps).
        root2, bias1 = adam_corrections(h.beta1, h.beta2, step)
        largest_v = v
        for max_exp_avg_sq in amsgrad:  # one tensor with amsgrad, else none
            largest_v = torch.maximum(load_moment(max_exp_avg_sq, None, t.layout, t.codec), v)
            store_moment(largest_v, max_exp_avg_sq, None, t.layout, t.codec, step)
        x = x - number(t.lr * root2 / bias1, x) * adam_direction(m, largest_v, h.eps * root2)
        t.store_param(x, step)
        store_moment(m, exp_avg, m_scale, t.layout, t.codec, step)
        store_moment(v, exp_avg_sq, v_scale, t.layout, t.codec, step)
