"""Fits the levels and thresholds of least mean squared error to a derivative."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..quant.codec import EVEN, MAX_THRESHOLDS, ODD, PLAIN
from .levels import Levels, check_bits, from_intervals

Derivative = Callable[[Tensor], Tensor]

SIGMAS = (0.25, 0.5, 1.0, 2.0, 3.0)
"""Standard deviations of the input's distribution, a mixture of normals of equal weight."""

BINS = 1024  # of the derivative's range; the search puts borders between levels only where bins meet
PER_UNIT = 2000  # grid points in x
REACH = 8  # standard deviations of the widest normal: 1e-15 lies beyond


class Fit(NamedTuple):
    """A fitted table, and the derivative's mean squared error by the sigma of each normal of the mixture."""

    levels: Levels
    errors: dict[float, float]


def mixture(x: Tensor, sigmas: Sequence[float]) -> Tensor:
    """The density at ``x`` of a mixture of normals around 0, of equal weight."""
    densities = [torch.exp(-0.5 * (x / s) ** 2) / (s * math.sqrt(2 * math.pi)) for s in sigmas]
    return torch.stack(densities).mean(0)


def _grid(sigmas: Sequence[float]) -> tuple[Tensor, float]:
    """Points in x, the midpoints of equal steps, symmetric around 0 (which is none of them); and the step."""
    half = math.ceil(REACH * max(sigmas)) * PER_UNIT
    return (torch.arange(-half, half, dtype=torch.float64) + 0.5) / PER_UNIT, 1 / PER_UNIT


def mean_squared_error(levels: Levels, derivative: Derivative, sigmas: Sequence[float] = SIGMAS) -> dict[float, float]:
    """Mean of (derivative - its level)^2 for x ~ N(0, s^2), for each s."""
    x, step = _grid(sigmas)
    square = (derivative(x) - levels.derivative(x).double()) ** 2
    return {s: float((square * mixture(x, [s])).sum()) * step for s in sigmas}


def _symmetry(d: Tensor) -> tuple[int, float]:
    """The symmetry of a derivative's values on the grid; and ``center`` where it is ODD: d(-x) = center - d(x)."""
    if torch.allclose(d, d.flip(0), rtol=0, atol=1e-9):
        return EVEN, 0.0
    center = float(d[0] + d[-1])
    odd = torch.allclose(d + d.flip(0), torch.full_like(d, center), rtol=0, atol=1e-9)
    return (ODD, center) if odd else (PLAIN, 0.0)


def _optimal(values: Tensor, weight: Tensor, count: int, exact: Sequence[float]) -> Tensor:
    """``count`` levels of least squared error, ``exact`` among them: optimal on BINS, then refined on all values.

    Dynamic programming over the bins in order: ``best[n, k][i]`` is the least cost of the first i bins with n levels,
    k of them from ``exact``; every other level is the mean of its bins. ``back_pointers`` gives the borders.
    """
    low, high = float(values.min()), float(values.max())
    index = ((values - low) / max(high - low, 1e-300) * (BINS - 1)).round().long()
    sums = torch.zeros(3, BINS + 1, dtype=torch.float64)
    for row, term in enumerate((weight, weight * values, weight * values**2)):
        sums[row, 1:] = torch.zeros(BINS, dtype=torch.float64).scatter_add_(0, index, term).cumsum(0)
    w, wv, wvv = (s[None, :] - s[:, None] for s in sums)  # of the bins from row to column
    invalid = torch.ones(BINS + 1, BINS + 1, dtype=torch.bool).tril(-1)
    costs = [(wvv - wv**2 / w.clamp(min=1e-300)), *(wvv - 2 * v * wv + v**2 * w for v in exact)]
    free, *pinned = (cost.clamp(min=0).masked_fill(invalid, torch.inf) for cost in costs)
    start = torch.full((BINS + 1,), torch.inf, dtype=torch.float64)
    start[0] = 0
    best = {(0, 0): start}
    back_pointers: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for n in range(1, count + 1):
        for k in range(max(0, n + len(exact) - count), min(n, len(exact)) + 1):
            candidates = []  # the last level is free, or the k-th exact one
            for previous, cost in [((n - 1, k), free), *([((n - 1, k - 1), pinned[k - 1])] if k else [])]:
                cost_before = best.get(previous, torch.full_like(start, torch.inf))
                candidates.append((cost_before[:, None] + cost).min(0))
            is_pinned = candidates[-1].values < candidates[0].values
            best[n, k] = torch.where(is_pinned, candidates[-1].values, candidates[0].values)
            back_pointers[n, k] = torch.where(is_pinned, candidates[-1].indices, candidates[0].indices), is_pinned
    levels: list[float] = []
    n, k, end = count, len(exact), BINS
    while n:
        begin, is_exact = (int(table[end]) for table in back_pointers[n, k])
        mean = float(wv[begin, end] / w[begin, end].clamp(min=1e-300))
        levels.append(exact[k - 1] if is_exact else mean)
        n, k, end = n - 1, k - is_exact, begin
    return _polish(torch.tensor(levels[::-1], dtype=torch.float64), values, weight, exact)


def _polish(levels: Tensor, values: Tensor, weight: Tensor, exact: Sequence[float]) -> Tensor:
    """Lloyd's iteration: each level moves to the mean of the values nearest to it."""
    order = values.argsort()
    values, weight = values[order], weight[order]
    totals = torch.zeros(2, len(values) + 1, dtype=torch.float64)
    totals[:, 1:] = torch.stack([weight, weight * values]).cumsum(1)
    free = ~torch.isin(levels, torch.tensor(exact, dtype=torch.float64))
    for _ in range(10000):
        borders = torch.searchsorted(values, (levels[1:] + levels[:-1]) / 2)
        edges = torch.cat([borders.new_zeros(1), borders, borders.new_full((1,), len(values))])
        w, wv = totals[:, edges].diff(dim=1)
        means = torch.where(free & (w > 0), wv / w.clamp(min=1e-300), levels)
        if torch.allclose(means, levels, rtol=0, atol=1e-12):
            break
        levels = means
    return levels


def _crossing(derivative: Derivative, value: float, low: float, high: float) -> float:
    """The x between ``low`` and ``high`` where the derivative crosses ``value``, by bisection; also at a jump."""
    is_above = lambda x: float(derivative(torch.tensor([x], dtype=torch.float64))[0]) > value  # noqa: E731
    side = is_above(low)
    while high - low > 1e-12 * max(1.0, abs(low)):
        middle = (low + high) / 2
        low, high = (middle, high) if is_above(middle) == side else (low, middle)
    return (low + high) / 2


def thresholds_of(
    derivative: Derivative, levels: Sequence[float], x: Tensor, d: Tensor
) -> tuple[list[float], list[int]]:
    """Where in ``x`` (ascending, with its derivatives ``d``) the nearest level changes, and each interval's level."""
    middles = [(a + b) / 2 for a, b in pairwise(levels)]
    nearest = torch.bucketize(d, torch.tensor(middles, dtype=torch.float64))
    thresholds: list[float] = []
    indices = [int(nearest[0])]
    for i in (nearest[1:] != nearest[:-1]).nonzero().flatten().tolist():
        before, after = int(nearest[i]), int(nearest[i + 1])
        low, high = float(x[i]), float(x[i + 1])
        step = 1 if after > before else -1
        for j in range(before, after, step):  # more than one at a jump
            x_crossing = _crossing(derivative, middles[j if step > 0 else j - 1], low, high)
            if thresholds and x_crossing - thresholds[-1] < 1e-9:  # the same x: one jump over several levels
                indices[-1] = j + step
                continue
            thresholds.append(x_crossing)
            indices.append(j + step)
    return thresholds, indices


def fit_levels(
    derivative: Derivative,
    bits: int,
    *,
    sigmas: Sequence[float] = SIGMAS,
    exact: Sequence[float] = (),
    decimals: int | None = None,
) -> Fit:
    """The ``2^bits`` levels of least mean squared error of a derivative, and the thresholds in x between them.

    The error is ``E[(d(x) - level(x))^2]`` over inputs from a mixture of normals around 0, of equal weight. A
    derivative that is even, or odd about a value (GELU's: d(-x) = 1 - d(x)), is recognized, and its codes then take
    half as many comparisons.

    derivative: takes a fp64 tensor, elementwise. bits: 1 to 4.
    sigmas: standard deviations of the normals.
    exact: levels that must be among them, ascending; for instance the derivative's limits, so that large inputs have
        no error. Of an odd derivative only those of x >= 0; those of x < 0 follow.
    decimals: rounds the levels to so many places; the thresholds are those between the rounded levels.

    Raises:
        ValueError: ``bits``, ``sigmas`` or ``exact`` is out of range, the derivative is not finite, or it needs more
            than 64 thresholds.
    """
    check_bits(bits)
    if not sigmas or min(sigmas) <= 0 or not all(map(math.isfinite, sigmas)):
        raise ValueError(f"sigmas must be positive numbers, at least one, got {tuple(sigmas)}")
    x, _ = _grid(sigmas)
    d = derivative(x)
    if d.shape != x.shape or not bool(d.isfinite().all()):
        raise ValueError(
            f"derivative must give a finite number for each x from {x[0]:.0f} to {x[-1]:.0f}, as a tensor like x"
        )
    symmetry, center = _symmetry(d)
    half = x > 0 if symmetry != PLAIN else torch.ones_like(x, dtype=torch.bool)
    count = 2 ** (bits - 1) if symmetry == ODD else 2**bits
    if len(exact) > count or sorted(set(exact)) != [*exact]:
        raise ValueError(f"exact must be at most {count} ascending numbers, got {tuple(exact)}")
    x, d = x[half], d[half]
    levels = _optimal(d, mixture(x, sigmas), count, exact)
    if decimals is not None:
        levels = levels.round(decimals=decimals)
    ascending = sorted(levels.tolist())
    thresholds, indices = thresholds_of(derivative, ascending, x, d)
    if len(thresholds) > MAX_THRESHOLDS:
        raise ValueError(f"derivative needs {len(thresholds)} thresholds; at most {MAX_THRESHOLDS} are allowed")
    table = from_intervals(bits, ascending, thresholds, indices, symmetry, center)
    return Fit(table, mean_squared_error(table, derivative, sigmas))
