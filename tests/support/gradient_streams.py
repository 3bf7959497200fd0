"""Synthetic gradient streams, and the error that an optimizer's stored state adds to its updates on them.

The streams are hard cases of a quantized moment: scales that differ inside a block, gradients that fall while that of
one element of the block does not, rows that are mostly zero, gradients not far above Adam's eps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memkern.optim.state import State, load_moment

ROWS, COLS = 32, 512
BLOCK = 128  # elements of a block in the stream "one stays large"
RUN = 64  # consecutive elements that are active together in the stream "sparse"


@dataclass(frozen=True)
class Stream:
    """gradient = scale * (mu + N(0, 1)) for each element, where mu is .98 of the last step's mu + .06 N(0, 1)."""

    element_log_sd: float = 0.7  # standard deviation of log(scale) over a row's elements
    scale: float = 1e-3  # the median of the rows' scales
    falls_after: Callable[[int], float] | None = None  # takes the number of steps; gradients fall to a tenth after it
    one_stays: bool = False  # whether the first element of each block does not fall
    active: float = 1.0  # the probability that a run of RUN elements has a gradient at a step
    gain: float = 1.0  # a factor of all gradients


STREAMS = {
    "base": Stream(),
    "heterogeneous": Stream(element_log_sd=2.0),
    "drop": Stream(falls_after=lambda steps: steps / 3),
    "sparse": Stream(element_log_sd=0.5, active=0.02, gain=5.0),
    "tiny": Stream(scale=1e-7),
    "equal": Stream(element_log_sd=0.0),
    "log-sd 0.5": Stream(element_log_sd=0.5),
    "one stays large": Stream(element_log_sd=0.0, falls_after=lambda steps: 500, one_stays=True),
}


def make(name: str, steps: int, seed: int = 0) -> Iterator[Tensor]:
    """The gradients of one stream: `steps` fp32 tensors of shape (32, 512), the same for the same seed."""
    stream = STREAMS[name]
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    scale = stream.scale * normal(ROWS, 1).exp() * (stream.element_log_sd * normal(ROWS, COLS)).exp()
    scale *= stream.gain
    fallen = torch.full((ROWS, COLS), 0.1)
    if stream.one_stays:
        fallen.view(-1, BLOCK)[:, 0] = 1.0
    falls_after = stream.falls_after(steps) if stream.falls_after else math.inf

    mu = torch.zeros(ROWS, COLS)
    for step in range(1, steps + 1):
        mu = 0.98 * mu + 0.06 * normal(ROWS, COLS)
        gradient = scale * (mu + normal(ROWS, COLS))
        if step > falls_after:
            gradient *= fallen
        if stream.active < 1:
            active = torch.rand(ROWS, COLS // RUN, generator=generator) < stream.active
            gradient *= active.repeat_interleave(RUN, dim=1)
        yield gradient


class ClosedLoop(NamedTuple):
    mean_error: float  # |update - exact update| / |exact update|, over all elements, averaged over all steps
    last_error: float  # |update - exact update| / |exact update| at the last step
    total_error: float  # |sum of updates - sum of exact updates| / |sum of exact updates|
    sqrt_v_ratio: float  # stored sqrt(v) over its exact value, averaged over elements, after the last step


def closed_loop(
    optimizer_factory: Callable[..., Any],
    stream: Iterable[Tensor],
    betas: tuple[float, float] = (0.9, 0.999),
    *,
    eps: float = 1e-8,
) -> ClosedLoop:
    """Compares the updates of an Adam with quantized states with the updates of Adam in fp64 on the same gradients.

    optimizer_factory(params, lr=, betas=, eps=, weight_decay=) makes the optimizer. Its parameter is zeroed before
    every step and lr is 1, so that after the step the parameter is minus the update.
    """
    param = torch.nn.Parameter(torch.zeros(ROWS, COLS))
    optimizer = optimizer_factory([param], lr=1.0, betas=betas, eps=eps, weight_decay=0.0)
    beta1, beta2 = betas
    m = torch.zeros(ROWS, COLS, dtype=torch.float64)
    v = torch.zeros_like(m)
    errors = []
    total, exact_total = torch.zeros_like(m), torch.zeros_like(m)
    for step, gradient in enumerate(stream, 1):
        with torch.no_grad():
            param.zero_()
        param.grad = gradient
        optimizer.step()

        g = gradient.double()
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        exact = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + eps)
        update = -param.detach().double()
        total += update
        exact_total += exact
        exact_norm = exact.norm()
        if exact_norm > 0:  # a sparse stream may not have begun
            errors.append((update - exact).norm() / exact_norm)
    touched = v > 0  # elements that have had a gradient
    state = optimizer.state[param]
    stored = load_moment("exp_avg_sq", state) if isinstance(state, State) else state["exp_avg_sq"]
    ratio = stored.double().sqrt()[touched] / v.sqrt()[touched]
    total_error = (total - exact_total).norm() / exact_total.norm()
    return ClosedLoop(torch.stack(errors).mean().item(), errors[-1].item(), total_error.item(), ratio.mean().item())
