"""Sums in fp64 rounded to odd, with which a fused multiply-add of fp32 is emulated without rounding twice."""

import numpy as np
from numpy.typing import NDArray


def sum_to_odd(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """a + b in fp64, rounded to odd: rounding it again, to fp32, is then rounding the exact sum."""
    total = a + b
    part = total - a
    lost = (a - (total - part)) + (b - part)
    bits = total.view(np.int64).copy()
    odd = (lost != 0) & np.isfinite(total) & (bits & 1 == 0)
    bits[odd] += np.where((lost[odd] > 0) == (total[odd] > 0), 1, -1)
    return bits.view(np.float64)
