"""divide() of csrc/cuda/fast_path.cuh, written in numpy, rounds as a division for every mantissa of the dividend."""

import numpy as np
import pytest

from memkern.quant.codec import POWER_LEVELS_SIGNED, POWER_LEVELS_UNSIGNED


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="longdouble is no wider than float64")
@pytest.mark.parametrize("levels", [POWER_LEVELS_SIGNED, POWER_LEVELS_UNSIGNED])
def test_a_division_in_three_operations_is_rounded_correctly(levels: int) -> None:
    x = (np.arange(2**23, dtype=np.uint32) | np.uint32(0x3F800000)).view(np.float32)  # all numbers from 1 to 2
    divisor = np.float32(levels * levels)
    reciprocal = np.float32(1) / divisor

    def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        """The product is exact in 48 bits of 64, so that the sum is rounded as one to 64 bits and then to 24."""
        return (np.longdouble(a) * np.longdouble(b) + np.longdouble(c)).astype(np.float32)

    quotient = x * reciprocal
    refined = fma(fma(-divisor, quotient, x), reciprocal, quotient)
    assert (quotient != x / divisor).any()  # there is something to refine
    assert (refined == x / divisor).all()
