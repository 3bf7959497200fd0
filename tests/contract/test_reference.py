"""The parts of memkern.reference, which specifies all kernels, agree with formulas in fp64.

Its steps are compared with formulas in tests/optim/generic, and with the kernels in tests/kernels.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from memkern.quant import codec as C
from memkern.quant.layout import layout_of, memory_order
from memkern.reference import blockwise, lion, state
from tests.support.helpers import CODECS, hard, over_layouts, over_signs, tensor


@pytest.mark.parametrize("seed", range(3))
def test_sqrt_is_correctly_rounded(seed: int) -> None:
    bits = torch.randint(0, 0x7F800000, (300,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    x = bits.view(torch.float32)
    for value, root in zip(x.tolist(), blockwise.sqrt(x).numpy(), strict=True):
        for neighbour in (np.nextafter(root, np.float32(0)), np.nextafter(root, np.float32(np.inf))):
            # The square of the middle between root and its neighbour decides, exactly.
            middle = (Fraction(float(root)) + Fraction(float(neighbour))) / 2
            assert (middle**2 > Fraction(value)) == (neighbour > root) or middle**2 == Fraction(value)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999, 0.99999])
def test_powers_are_near_those_in_fp64(beta: float) -> None:
    assert state.power_of(beta, 0) == 1
    assert state.power_of(beta, 1) == beta
    for step in (2, 3, 10, 1000, 12345, 2**24):
        # A squaring doubles the error of what it squares.
        assert math.isclose(state.power_of(beta, step), beta**step, rel_tol=step * 2**-52, abs_tol=1e-300)


def test_sign_of_zeros_is_0_and_of_nan_nan() -> None:
    x = torch.tensor([3.0, -2e-45, 0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    s = lion.sign(x)
    assert s[:6].tolist() == [1, -1, 0, 0, 1, -1]
    assert s[6].isnan()


@over_layouts
@pytest.mark.parametrize("block_size", [8, 128])
def test_blocks_hold_every_element_once_in_memory_order(layout: str, block_size: int) -> None:
    x = tensor(layout)
    cut = layout_of(x, block_size)
    blocks = blockwise.to_blocks(x, cut)
    assert tuple(blocks.shape) == (cut.blocks, cut.block)
    flat = memory_order(x).tolist()
    rows = [flat[i : i + cut.segment] for i in range(0, cut.numel, max(cut.segment, 1))]
    expected = [row[i : i + cut.block] for row in rows for i in range(0, len(row), cut.block)]
    for block, values in zip(blocks.tolist(), expected, strict=True):
        assert block == values + [0.0] * (cut.block - len(values))
    back = torch.empty_like(x)
    blockwise.from_blocks(blocks, cut, back)
    assert torch.equal(back, x)


@over_signs
@pytest.mark.parametrize("codec", CODECS)
def test_moments_come_back_decayed(codec: str, signed: bool) -> None:
    x = hard((6, 300), 0, signed=signed)
    cut, number = layout_of(x, 128), C.CODECS[codec]
    codes = torch.zeros(x.shape, dtype=torch.int8 if signed else torch.uint8)
    scale = torch.zeros(cut.scale_shape)
    blocks = blockwise.to_blocks(x, cut)
    state.store_moment(blocks, codes, scale, cut, number, step=3)
    loaded, decayed = (state.load_moment(codes, scale, cut, number, decay) for decay in (1.0, 0.9))
    torch.testing.assert_close(decayed, 0.9 * loaded, rtol=1e-6, atol=0)
    largest = blocks.abs().amax(1, keepdim=True)
    if codec == "power":
        # At the largest value the step between codes of m is 2 / 127 of it, of v's fourth root 4 / 255, with dither.
        assert ((loaded - blocks).abs() <= largest * (2.02 / 127 if signed else 4.02 / 255)).all()
    else:
        # Half of the widest gap between neighbouring values of the map.
        gaps = torch.tensor(C.dynamic_map(signed)).diff().max()
        assert ((loaded - blocks).abs() <= largest * (gaps / 2 + 1e-6)).all()
