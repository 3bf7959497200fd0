"""Learning rates for larger batches."""

from __future__ import annotations

import math

from ..options import LR_RULES


def scale_lr(base_lr: float, batch_factor: float, rule: str = "sqrt") -> float:
    """The learning rate for a batch ``batch_factor`` times the one that ``base_lr`` was found for.

    ::

        linear:  base_lr * batch_factor          for SGD: Goyal et al., arXiv 1706.02677
        sqrt:    base_lr * sqrt(batch_factor)    for LAMB: You et al., arXiv 1904.00962, section 4 (after Krizhevsky,
                                                 arXiv 1404.5997); for Adam: Malladi et al., arXiv 2205.10287
        none:    base_lr

    Large batches want a gradual warm-up to the scaled rate: over the first 5 epochs (Goyal et al.), or over a share of
    the epochs in proportion to the batch (You et al.). torch's schedulers do it: ``SequentialLR`` of ``LinearLR`` and
    what follows (:func:`memkern.train.loop.warmup_cosine`).

    Raises:
        ValueError: an unknown rule, a rate below 0, a factor that is not above 0.
    """
    if rule not in LR_RULES:
        raise ValueError(f"rule must be one of {', '.join(LR_RULES)}, got {rule!r}")
    if not base_lr >= 0:
        raise ValueError(f"base_lr must be 0 or more, got {base_lr}")
    if not 0 < batch_factor < math.inf:
        raise ValueError(f"batch_factor must be above 0, got {batch_factor}")
    return base_lr * {"none": 1.0, "linear": batch_factor, "sqrt": math.sqrt(batch_factor)}[rule]
