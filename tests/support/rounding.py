"""Sums in fp64 rounded to odd, with which a fused multiply-add of fp32 is emulated without rounding twice."""

import numpy as np
from numpy.typing import NDArray


def sum_to_odd(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """a + b in fp64, rounded to odd: rounding it again, to fp32, is then rounding the exact sum."""
    total = a + b
    rounded_b = total - a
    error = (a - (total - rounded_b)) + (b - rounded_b)  # exactly a + b - total (Knuth's two-sum)
    bits = total.view(np.int64).copy()
    even = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    bits[even] += np.where((error[even] > 0) == (total[even] > 0), 1, -1)
    return bits.view(np.float64)
