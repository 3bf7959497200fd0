"""memkern.reference, which specifies all kernels: its parts and its steps agree with formulas in fp64."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from memkern import optim, use_backend
from memkern.quant import codec as C
from memkern.quant.layout import layout_of, memory_order
from memkern.reference import blockwise, lion, state
from tests.support.helpers import CODECS, LAYOUTS, hard, over_layouts, over_signs, tensor

# ---- parts


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


# ---- whole steps


def moments(optimizer: torch.optim.Optimizer, p: Tensor, decoded: bool = True) -> dict[str, Tensor]:
    """The stored moments in fp64 blocks."""
    entries, group = optimizer.state[p], optimizer.param_groups[0]
    cut = layout_of(p, group["block_size"])
    return {
        key: state.load_moment(entries[key], entries.get(f"{key}_scale"), cut, C.CODECS[group["codec"]]).double()
        for key in ("exp_avg", "exp_avg_sq")
        if key in entries
    }


@pytest.mark.parametrize("layout", [k for k in LAYOUTS if "empty" not in k])
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize(
    "options", [{"state_bits": 32}, {"state_bits": 8}, {"state_bits": 8, "codec": "dynamic"}], ids=str
)
def test_an_adam_step_is_its_formula(layout: str, decoupled: bool, options: dict) -> None:
    lr, b1, b2, eps, decay = 1e-2, 0.9, 0.99, 1e-8, 0.1
    p = torch.nn.Parameter(tensor(layout, scale=0.1))
    build = optim.AdamW if decoupled else optim.Adam
    optimizer = build([p], lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay, min_8bit_size=0, **options)
    cut = layout_of(p, 128)
    with use_backend("reference"):
        for step in range(1, 4):
            before = moments(optimizer, p) if step > 1 else {}
            x = blockwise.to_blocks(p.detach(), cut).double()
            p.grad = torch.empty_like(p).copy_(hard(p.shape, step))
            g = blockwise.to_blocks(p.grad, cut).double()
            optimizer.step()
            # The expected step: fp64, from the moments as they were stored.
            if decoupled:
                x = x * (1 - lr * decay)
            else:
                g = g + decay * x
            m = b1 * before.get("exp_avg", 0) + (1 - b1) * g
            v = b2 * before.get("exp_avg_sq", 0) + (1 - b2) * g * g
            update = lr / (1 - b1**step) * m / ((v / (1 - b2**step)).sqrt() + eps)
            error = (blockwise.to_blocks(p.detach(), cut).double() - (x - update)).abs()
            # About ten fp32 roundings, of numbers up to |x| and up to the moments' terms, which may cancel.
            assert (error <= 1e-6 * x.abs() + 1e-4 * update.abs() + 2e-5 * lr).all()
            assert (error <= 1e-6 * x.abs() + 1e-6 * update.abs()).double().mean() > 0.99


@pytest.mark.parametrize("layout", ["odd", "channels_last", "0-dim"])
@pytest.mark.parametrize("bits", [32, 8])
def test_a_lion_step_is_its_formula(layout: str, bits: int) -> None:
    lr, b1, b2, decay = 1e-2, 0.9, 0.99, 0.1
    p = torch.nn.Parameter(tensor(layout, scale=0.1))
    optimizer = optim.Lion([p], lr=lr, betas=(b1, b2), weight_decay=decay, min_8bit_size=0, state_bits=bits)
    cut = layout_of(p, 128)
    with use_backend("reference"):
        for step in range(3):
            before = moments(optimizer, p)["exp_avg"] if step else 0.0
            x = blockwise.to_blocks(p.detach(), cut).double()
            p.grad = torch.empty_like(p).copy_(hard(p.shape, step))
            g = blockwise.to_blocks(p.grad, cut).double()
            optimizer.step()
            u = b1 * before + (1 - b1) * g
            sure = u.abs() > 1e-6 * (abs(before) + g.abs())  # else rounding may turn the sign
            expected = x * (1 - lr * decay) - lr * u.sign()
            actual = blockwise.to_blocks(p.detach(), cut).double()
            torch.testing.assert_close(actual[sure | (g == 0)], expected[sure | (g == 0)], rtol=1e-6, atol=1e-8)
            assert sure.sum() >= 0.9 * (u != 0).sum()
