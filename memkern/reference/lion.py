"""Lion. Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..schemas import LION_STEP, StepArgs
from .blockwise import number
from .state import (
    check_step,
    gradient,
    gradient_factor,
    load_moment,
    next_step,
    skipped,
    store_moment,
    tensors_of,
)


def sign(x: Tensor) -> Tensor:
    """-1 or 1; zeros and NaN stay as they are, a zero with its sign. (torch.sign makes NaN 0.)"""
    return torch.where(x.abs() > 0, torch.copysign(torch.ones_like(x), x), x)


def lion_step_(args: StepArgs) -> None:
    """One step for many tensors, in place."""
    check_step(LION_STEP, args)
    factor = gradient_factor(args.grad_scale, args.grad_norm, args.max_grad_norm)
    if skipped(args.found_inf):
        return
    for t in tensors_of(LION_STEP, args):
        h, (exp_avg,), (m_scale,) = t.h, t.moments, t.scales
        step = next_step(t)
        x = t.load_param()
        x = x * number(1.0 - t.lr * h.weight_decay, x)
        g = gradient(t.grad, t.layout, h.maximize, factor)
        m = load_moment(exp_avg, m_scale, t.layout, t.codec)
        update = sign(number(h.beta1, x) * m + number(1 - h.beta1, x) * g)
        t.store_param(x - number(t.lr, x) * update, step)
        m = number(h.beta2, x) * m + number(1 - h.beta2, x) * g
        store_moment(m, exp_avg, m_scale, t.layout, t.codec, step)
