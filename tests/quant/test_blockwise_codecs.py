"""Codes of memkern.quantize_blockwise are those of formulas in fp64: the nearest ones, or the dithered ones."""

from collections.abc import Iterator

import pytest
import torch

import memkern
from memkern.quant import codec as C
from memkern.quant.layout import layout_of
from memkern.reference.blockwise import dither, to_blocks
from tests.support.helpers import hard, on, over_codecs, over_dtypes, over_signs

FLT_MAX = torch.finfo(torch.float32).max
TINIEST = 2.0**-149  # the least fp32 denormal
# Scales below which the factor that a block is multiplied by overflows, and the block is stored as zeros.
LEAST_SCALE = {"power": 255**2 / FLT_MAX * 1.001, "dynamic": 1 / FLT_MAX * 1.001}


@pytest.fixture(autouse=True)
def _on_the_reference() -> Iterator[None]:
    """tests/kernels/test_cases.py compares the other backends with it."""
    with on("reference"):
        yield


def blocks_of(x: torch.Tensor, block_size: int) -> torch.Tensor:
    return to_blocks(x, layout_of(x, block_size))


@over_dtypes
@pytest.mark.parametrize("block_size", [8, 128, 4096])
def test_signed_power_is_the_nearest_root(dtype: torch.dtype, block_size: int) -> None:
    x = hard((16, 1024), 0).to(dtype)
    codes, scale = memkern.quantize_blockwise(x, block_size=block_size)
    x, q = blocks_of(x, block_size).double(), blocks_of(codes, block_size).double()
    assert torch.equal(scale.reshape(-1).double(), x.abs().amax(1))
    s = scale.reshape(-1, 1).double().clamp_min(TINIEST)
    expected = x.sign() * 127 * (x.abs() / s).sqrt()
    # fp32 rounds the factor, the product and the root: under 127 * 2 * 2^-24 together.
    assert (q - expected).abs().max() <= 0.5 + 127 * 2**-23


@over_dtypes
@pytest.mark.parametrize("step", [None, 1, 12345])
def test_unsigned_power_rounds_down_after_u_and_never_to_zero(dtype: torch.dtype, step: int | None) -> None:
    x = hard((16, 1024), 0, signed=False).to(dtype)
    codes, scale = memkern.quantize_blockwise(x, signed=False, step=step)
    x, q = blocks_of(x, 128).double(), blocks_of(codes, 128).double()
    s = scale.reshape(-1, 1).double().clamp_min(TINIEST)
    c = 255 * (x / s).sqrt()
    u = 0.5 if step is None else dither(128, step, torch.device("cpu")).double()
    slack = 255 * 2**-23 + 2**-17  # as above, and the rounding of c + u to fp32
    low, high = (c + u - slack).floor().clamp(1, 255), (c + u + slack).floor().clamp(1, 255)
    positive = x > 0
    assert ((low <= q) & (q <= high))[positive].all()
    assert (low == high)[positive].double().mean() > 0.99  # so the line above leaves nearly all codes no choice
    assert (q[~positive] == 0).all()
    assert (q[positive & (s > LEAST_SCALE["power"])] >= 1).all()


@over_signs
@over_dtypes
def test_dynamic_is_the_nearest_entry(signed: bool, dtype: torch.dtype) -> None:
    x = hard((16, 1024), 0, signed=signed).to(dtype)
    codes, scale = memkern.quantize_blockwise(x, codec="dynamic", signed=signed)
    entries = torch.tensor(C.dynamic_map(signed), dtype=torch.float64)
    s = scale.reshape(-1, 1)
    t = torch.where(s > LEAST_SCALE["dynamic"], blocks_of(x, 128) * (1 / s), 0).double()
    q = blocks_of(codes, 128).long() + (C.dynamic_zero(True) if signed else 0)
    distance = (t - entries[q % 256]).abs()
    least_distance = (t[..., None] - entries).abs().amin(-1)
    assert torch.equal(distance, least_distance)


@over_codecs
@over_signs
def test_every_code_comes_back(codec: str, signed: bool) -> None:
    codes = torch.arange(-128 if signed else 0, 128 if signed else 256).to(torch.int8 if signed else torch.uint8)
    if codec == "power" and signed:
        codes = codes[1:]  # -128 is no power code
    codes = codes[None]
    scale = torch.full(layout_of(codes, 256).scale_shape, 0.37)
    x = memkern.dequantize_blockwise(codes, scale, codec=codec, block_size=256)
    requantized, s = memkern.quantize_blockwise(x, codec=codec, signed=signed, block_size=256)
    assert abs(s.item() / 0.37 - 1) <= 3 * 2**-24  # 0.37, the quotient and the product are rounded
    assert torch.equal(requantized, codes)
    assert x.unique().numel() == codes.numel()


@over_dtypes
def test_dequantize_is_the_formula(dtype: torch.dtype) -> None:
    codes, scale = torch.randint(-127, 128, (3, 300)).to(torch.int8), torch.rand(3, 3)
    x = memkern.dequantize_blockwise(codes, scale, dtype=dtype)
    s = scale.repeat_interleave(128, 1)[:, :300]
    q = codes.double()
    truth = s.double() / 127**2 * q * q.abs()
    # Two roundings to fp32 and one to dtype.
    bound = (2 * 2**-24 + torch.finfo(dtype).eps / 2) * truth.abs() + torch.finfo(dtype).smallest_normal * 2**-7
    assert ((x.double() - truth).abs() <= bound).all()


def test_codes_dithered_over_steps_are_unbiased() -> None:
    x = hard((4, 128), 3, signed=False).clamp_min(1e-6)
    total, steps = torch.zeros(4, 128, dtype=torch.float64), 2000
    for step in range(1, steps + 1):
        codes, scale = memkern.quantize_blockwise(x, signed=False, step=step)
        total += codes
    c = 255 * (x.double() / scale.double()).sqrt()
    # Evenly spread offsets miss by about log(steps) / steps, where random ones would by 1 / (2 sqrt(steps)).
    free = (c > 1) & (c < 254.5)
    assert (total / steps - c)[free].abs().max() < 0.005
    assert (total / steps)[c <= 1].min() == 1  # never 0, at the price of a bias below the first code
