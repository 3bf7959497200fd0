"""Codes results between two limits, such as sigmoid's, in 8 bits, by their distance from the nearer limit.

The derivative is made of that distance: ``y (1 - y)`` of sigmoid, ``1 - y ** 2`` of tanh, ``p - 1`` at the target of a
cross entropy. Codes of y itself are off by a share of y, which near a limit is many times the distance. So one or two
bits tell which limit is the nearer one, and what is coded is the square root of the distance d in blocks with the
largest d of s, by the unsigned power code::

    d = (s ** .5 * (q / 255) ** 2) ** 2        off by .0045 * (s / d) ** .25 of d in root mean square

That is .5 % of a block's largest distance, 2.5 % of one a thousandth of it, and .6 % of the norm of all distances of a
block at most. Thanks to the square root, saturated and other units of a layer may share a block of codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _ops
from ..fewbit.levels import Levels
from .rules import PROBABILITY, TANH


class Limits(NamedTuple):
    """How an operation's results y and their distances from the nearer limit follow from one another.

    root: computes the square roots of the distances from y. sides: the table that gives the bits that tell the nearer
    limit. result: computes y from roots and bits.
    """

    root: Callable[[Tensor], Tensor]
    sides: Levels
    result: Callable[[Tensor, Tensor], Tensor]


def _root(y: Tensor) -> Tensor:
    """The root of min(|y|, 1 - |y|); a softmax may exceed 1 by rounding."""
    y = y.abs()
    return torch.minimum(y, 1 - y).clamp_min_(0).sqrt_()


def _result(limit: Sequence[float], sign: Sequence[float]) -> Callable[[Tensor, Tensor], Tensor]:
    """The function limit + sign * distance of roots and bits. limit, sign: by the value of the bits."""

    def result(root: Tensor, bits: Tensor) -> Tensor:
        distance = _ops.few_bit_backward(root * root, bits, sign)
        return distance.add_(_ops.few_bit_backward(torch.ones_like(root), bits, limit))

    return result


# The bits are Gray codes of intervals of y: in ascending order 0, 1 for limits 0 and 1, and 0, 1, 3, 2 for -1 and 1.
LIMITS = {
    PROBABILITY: Limits(_root, Levels(1, (), (0.5,), (1,)), _result((0.0, 1.0), (1.0, -1.0))),
    TANH: Limits(
        _root,
        Levels(2, (), (-0.5, 0.0, 0.5), (1, 2, 1)),
        _result((-1.0, 0.0, 1.0, 0.0), (1.0, -1.0, -1.0, 1.0)),
    ),
}
