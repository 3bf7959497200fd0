"""LARS. Sources: You et al., arXiv 1904.00962, algorithm 1; You, Gitman and Ginsburg, arXiv 1708.03888 (classic)."""

from __future__ import annotations

import torch

from ..schemas import LARS_STEP, StepArgs
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
from .trust import check_trust_ratios, per_block, ratio_or_one, squares_of_layers


def lars_step_(args: StepArgs) -> None:
    """One step for many tensors, in place. ``trust_ratios[i]`` gets the ratio of each layer of tensor i.

    A ``trust_coeff`` of 0 asks for the paper's form, which has no coefficient; the classic form's is above 0.
    """
    check_step(LARS_STEP, args)
    check_trust_ratios(LARS_STEP, args)
    factor = gradient_factor(args.grad_scale, args.grad_norm, args.max_grad_norm)
    if skipped(args.found_inf):
        return
    for t in tensors_of(LARS_STEP, args):
        h, (exp_avg,), (m_scale,) = t.h, t.moments, t.scales
        ratios = t.trust_ratios
        assert ratios is not None
        step = next_step(t)
        classic = h.trust_coeff != 0
        adapt = h.weight_decay != 0 or h.always_adapt != 0
        x = t.load_param()
        g = gradient(t.grad, t.layout, h.maximize, factor)
        d = g if (decay := number(h.weight_decay, x)) == 0 else g + decay * x
        m = number(h.momentum, x) * load_moment(exp_avg, m_scale, t.layout, t.codec)
        if not classic:
            m = m + number(1.0 - h.momentum, x) * d
        x_norm, update_norm = squares_of_layers(t, x, g if classic else m).sqrt().unbind(1)
        if t.squares_only:
            continue
        ratios.fill_(1.0)
        if adapt:
            numerator = h.trust_coeff * x_norm if classic else x_norm
            denominator = update_norm + x_norm * h.weight_decay + h.eps if classic else update_norm
            ratio = ratio_or_one(x_norm, update_norm, numerator / denominator)
            if h.trust_clip:
                ratio = (ratio / t.lr if classic else ratio).clamp(max=1.0)
            ratios.copy_(ratio)
        if classic:
            d = per_block(ratios, t.layout, x) * d
            # As in torch.optim.SGD, the first step's gradient is not dampened.
            m = m + number(1.0 if step == 1 else 1.0 - h.dampening, x) * d
        update = d + number(h.momentum, x) * m if h.nesterov else m
        rate = per_block(t.lr * (torch.ones_like(ratios) if classic else ratios).double(), t.layout, x)
        t.store_param(x - rate * update, step)
        store_moment(m, exp_avg, m_scale, t.layout, t.codec, step)
