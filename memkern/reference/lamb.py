"""LAMB. Source: You et al., "Large Batch Optimization for Deep Learning" (arXiv 1904.00962), algorithm 2."""

from __future__ import annotations

from ..schemas import LAMB_STEP, StepArgs
from .adam import adam_corrections, adam_direction, adam_moments
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


def lamb_step_(args: StepArgs) -> None:
    """One step for many tensors, in place. ``trust_ratios[i]`` gets the ratio of each layer of tensor i."""
    check_step(LAMB_STEP, args)
    check_trust_ratios(LAMB_STEP, args)
    factor = gradient_factor(args.grad_scale, args.grad_norm, args.max_grad_norm)
    if skipped(args.found_inf):
        return
    for t in tensors_of(LAMB_STEP, args):
        h, (exp_avg, exp_avg_sq), (m_scale, v_scale) = t.h, t.moments, t.scales
        ratios = t.trust_ratios
        assert ratios is not None
        step = next_step(t)
        x = t.load_param()
        g = gradient(t.grad, t.layout, h.maximize, factor)
        if h.decoupled_decay:
            x = x * number(1.0 - t.lr * h.weight_decay, x)
        m = load_moment(exp_avg, m_scale, t.layout, t.codec, h.beta1)
        v = load_moment(exp_avg_sq, v_scale, t.layout, t.codec, h.beta2)
        m, v = adam_moments(m, v, g, h.beta1, h.beta2)
        # m^ / (sqrt(v^) + eps), as Adam has it, but with its true scale, which the norm needs.
        root2, bias1 = adam_corrections(h.beta1, h.beta2, step) if h.bias_correction else (1.0, 1.0)
        update = number(root2 / bias1, x) * adam_direction(m, v, h.eps * root2)
        if not h.decoupled_decay and (decay := number(h.weight_decay, x)) != 0:
            update = update + decay * x
        squares = squares_of_layers(t, x, update)
        if t.squares_only:
            continue
        ratios.fill_(1.0)
        if h.weight_decay != 0 or h.always_adapt:
            x_norm, update_norm = squares.sqrt().unbind(1)
            ratios.copy_(ratio_or_one(x_norm, update_norm, x_norm / update_norm))
            if h.trust_clip:
                ratios.clamp_(max=1.0)
        x = x - per_block(t.lr * ratios.double(), t.layout, x) * update
        t.store_param(x, step)
        store_moment(m, exp_avg, m_scale, t.layout, t.codec, step)
        store_moment(v, exp_avg_sq, v_scale, t.layout, t.codec, step)
