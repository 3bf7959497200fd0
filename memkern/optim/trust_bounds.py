"""Bounds the norm of a layer's weights in its trust ratio: phi of the LAMB paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from ..schemas import StepArgs, StepOp


def check_trust_bounds(bounds: Any) -> None:
    """Raises ValueError unless ``bounds`` is None or two numbers, 0 <= low < high; high may be infinite."""
    if bounds is None:
        return
    is_pair = isinstance(bounds, (tuple, list)) and len(bounds) == 2
    if not (is_pair and all(isinstance(x, Real) for x in bounds) and 0 <= bounds[0] < bounds[1]):
        raise ValueError(f"trust_bounds must be None or (low, high), numbers with 0 <= low < high, got {bounds!r}")


def new_squares(args: StepArgs) -> Tensor:
    """Zeros for ``StepArgs.squares``: two sums of squares for each layer, float64."""
    count = sum(map(Tensor.numel, args.trust_ratios))
    return torch.zeros((count, 2), dtype=torch.float64, device=args.params[0].device)


def clamp_norms(args: StepArgs, groups: Sequence[Mapping[str, Any]]) -> None:
    """Applies phi to ``args.squares``: clamps weights' sums of squares to the squares of their group's bounds."""
    assert args.squares is not None
    first = last = 0
    next_numbers = [*args.group[1:], None]
    for number, next_number, ratios in zip(args.group, next_numbers, args.trust_ratios, strict=True):
        last += ratios.numel()
        if number == next_number:
            continue  # the layers of successive parameters of one group are clamped at once
        if (bounds := groups[number].get("trust_bounds")) is not None:
            low, high = map(float, bounds)
            args.squares[first:last, 0].clamp_(low * low, high * high)
        first = last


def step_(op: StepOp, args: StepArgs, by_reference: bool, groups: Sequence[Mapping[str, Any]]) -> None:
    """The op's step with bounds: its two passes are two calls, between which the norms are clamped."""
    args = args._replace(squares=new_squares(args))
    _ops.step_(op, args._replace(squares_only=True), by_reference)
    clamp_norms(args, groups)
    _ops.step_(op, args, by_reference)
