"""SGD with momentum. Source: torch.optim.SGD; Sutskever et al., ICML 2013 (Nesterov's momentum)."""

from __future__ import annotations

from ..schemas import SGD_STEP, StepArgs
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


def sgd_step_(args: StepArgs) -> None:
    """One step for many tensors, in place."""
    check_step(SGD_STEP, args)
    factor = gradient_factor(args.grad_scale, args.grad_norm, args.max_grad_norm)
    if skipped(args.found_inf):
        return
    for t in tensors_of(SGD_STEP, args):
        h, (momentum_buffer,), (scale,) = t.h, t.moments, t.scales
        step = next_step(t)
        x = t.load_param()
        d = gradient(t.grad, t.layout, h.maximize, factor)
        if (decay := number(h.weight_decay, x)) != 0:
            d = d + decay * x
        m = load_moment(momentum_buffer, scale, t.layout, t.codec)
        weight = 1.0 if step == 1 else 1.0 - h.dampening  # as in torch.optim.SGD
        m = number(h.momentum, x) * m + number(weight, x) * d
        update = d + number(h.momentum, x) * m if h.nesterov else m
        t.store_param(x - number(t.lr, x) * update, step)
        store_moment(m, momentum_buffer, scale, t.layout, t.codec, step)
