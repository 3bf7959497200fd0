"""What an activation saves in place of x for its derivative d: codes by :class:`Levels`, or one bit with the output by
:class:`TwoBranch`.

Levels: the code of an element is the XOR of ``flips[i]`` over all i with ``thresholds[i] < u`` (in fp32). u is x, or
``|x|`` where d is even, ``d(-x) = d(x)``, or odd but for a constant, ``d(-x) = 2 d(0) - d(x)``. In the latter case
``x < 0`` also flips the code's top bit. The backward pass takes ``levels[code]`` for the derivative. So the backward
kernel is the same for every activation, and an activation adds a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..quant.codec import EVEN, MAX_BITS, ODD, PLAIN, to_fp32

SYMMETRIES = (PLAIN, EVEN, ODD)


class Levels(NamedTuple):
    """A derivative's ``2^bits`` levels by code, and how x becomes a code (see :mod:`memkern.fewbit.levels`)."""

    bits: int
    levels: tuple[float, ...]
    thresholds: tuple[float, ...]
    flips: tuple[int, ...]
    symmetry: int = PLAIN

    def codes(self, x: Tensor) -> Tensor:
        """The code of each element, one byte each."""
        x = x.float()  # a bf16 tensor would round the thresholds to bf16
        u = x if self.symmetry == PLAIN else x.abs()
        code = torch.zeros_like(x, dtype=torch.uint8)
        for threshold, flip in zip(self.thresholds, self.flips, strict=True):
            code ^= (u > to_fp32(threshold)).to(torch.uint8) * flip
        if self.symmetry == ODD:
            code ^= (x < 0).to(torch.uint8) << (self.bits - 1)
        return code

    def derivative(self, x: Tensor) -> Tensor:
        """The level that the backward pass uses as the derivative at ``x``, in fp32."""
        return torch.tensor(self.levels, dtype=torch.float32, device=x.device)[self.codes(x).long()]

    def scaled(self, factor: float) -> Levels:
        """The table of f(factor * x) / factor."""
        return self._replace(thresholds=tuple(t / factor for t in self.thresholds))

    def one_minus(self) -> Levels:
        """The table of x - f(x): tanhshrink's from tanh's, and log-sigmoid's, x - softplus(x), from softplus'."""
        return self._replace(levels=tuple(1 - level for level in self.levels))


class TwoBranch(NamedTuple):
    """The derivative of an activation with one minimum, at ``at``, from its output y and the bit ``x > at``.

    On each side it is a polynomial in ``z = 2 min(s, reach) / reach - 1`` with ``s = sqrt(max(y - minimum, 0))``: as a
    function of s the derivative is smooth at the minimum. ``falling`` has the coefficients for x <= at, ``rising`` as
    many for x > at, from the highest power down.
    """

    at: float
    minimum: float
    falling: tuple[float, ...]
    rising: tuple[float, ...]
    falling_reach: float
    rising_reach: float


def check_bits(bits: int) -> None:
    """Raises ValueError unless ``bits`` is 1, 2, 3 or 4."""
    if not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= MAX_BITS:
        raise ValueError(f"bits must be an integer from 1 to {MAX_BITS}, got {bits!r}")


def gray(index: int) -> int:
    """The Gray code: neighbours differ in one bit, so that the threshold between them flips one bit plane only."""
    return index ^ (index >> 1)


def from_intervals(
    bits: int,
    levels: Sequence[float],
    thresholds: Sequence[float],
    indices: Sequence[int],
    symmetry: int = PLAIN,
    center: float = 0.0,
) -> Levels:
    """The table that gives ``levels[indices[i]]`` to u between thresholds i - 1 and i.

    levels: ascending; for an odd derivative those of x >= 0 alone. Those of x < 0 are then ``center - level``.
    """
    start = gray(indices[0])  # XORed to every code, so that code 0 is that of u below all thresholds
    by_code = [0.0] * len(levels)
    for i, level in enumerate(levels):
        by_code[gray(i) ^ start] = level
    flips = [gray(a) ^ gray(b) for a, b in pairwise(indices)]
    if symmetry == ODD:
        by_code += [center - level for level in by_code]
    return Levels(bits, tuple(by_code), tuple(thresholds), tuple(flips), symmetry)


def from_steps(bits: int, symmetry: int, steps: Sequence[float], thresholds: Sequence[float]) -> Levels:
    """The table that gives ``steps[i]`` to u between thresholds i - 1 and i.

    For an odd derivative, whose levels of x < 0 are ``1 - step``, to six decimals.
    """
    levels = sorted({*steps})
    table = from_intervals(bits, levels, thresholds, [*map(levels.index, steps)], symmetry, 1.0)
    return table._replace(levels=tuple(round(level, 6) for level in table.levels))


def below(x: float) -> float:
    """The largest fp32 number under ``x``, so that ``u > below(x)`` is ``u >= x``."""
    fp32, down = (torch.tensor(y, dtype=torch.float32, device="cpu") for y in (x, -torch.inf))
    return float(torch.nextafter(fp32, down))


def relu_levels(negative_slope: float = 0.0, threshold: float = 0.0) -> Levels:
    """Exact: 1 for x > threshold, else the slope."""
    return Levels(1, (negative_slope, 1.0), (threshold,), (1,))


def hardtanh_levels(min_val: float, max_val: float, slope: float = 1.0) -> Levels:
    """Exact: the slope for min_val < x < max_val, else 0."""
    return Levels(1, (0.0, slope), (min_val, below(max_val)), (1, 1))


def shrink_levels(lambd: float) -> Levels:
    """Exact: 1 for |x| > lambd, else 0."""
    return Levels(1, (0.0, 1.0), (lambd,), (1,), EVEN)


ELU_ALPHA = 0.5
"""The alpha of ELU's table: below 1 its derivative jumps at 0, so that a threshold is there."""


def elu_levels(table: Levels, alpha: float, scale: float = 1.0) -> Levels:
    """The table of scale * ELU with any alpha: ``scale`` for x > 0, and scale * alpha * exp(x) elsewhere.

    The level 1 is that of x > 0 alone, the others are proportional to alpha.
    """
    factor = scale * alpha / ELU_ALPHA
    return table._replace(levels=tuple(scale if v == 1 else factor * v for v in table.levels))


def softplus_levels(table: Levels, beta: float, threshold: float) -> Levels:
    """The table of the logistic function, with 1 where ``beta * x > threshold``: there softplus is x itself.

    A ``threshold`` above the table's own thresholds changes nothing: above these the table has its level nearest to 1,
    and no code is left for 1 itself.
    """
    bounds = sorted({-t for t in table.thresholds} | {0.0, *table.thresholds})
    if threshold < bounds[-1]:
        bounds = [*(t for t in bounds if t < threshold), threshold]
        middles = [bounds[0] - 1, *((a + b) / 2 for a, b in pairwise(bounds))]
        with _disable_current_modes():  # of fake tensors, which have no values
            x = torch.tensor(middles, dtype=torch.float32, device="cpu")
            levels = [*table.derivative(x).tolist(), 1.0]
        unused = [1.0] * (2**table.bits - len(levels))
        table = from_intervals(table.bits, [*levels, *unused], bounds, range(len(levels)))
    return table.scaled(beta)
