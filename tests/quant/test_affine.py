"""memkern.quantize_affine and dequantize_affine follow the formula; errors are at most a step; bad input is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import memkern

SHAPES = [(), (1,), (7,), (3, 5), (4, 300), (2, 3, 128), (0, 4)]


def there_and_back(x: Tensor, **options: Any) -> Tensor:
    codes, scale, zero_point = memkern.quantize_affine(x, **options)
    options.pop("bits", None)
    return memkern.dequantize_affine(codes, scale, zero_point, **options)


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_scales_and_zero_points_follow_the_formula(bits: int) -> None:
    x = torch.randn(4, 300)
    codes, scale, zero_point = memkern.quantize_affine(x, bits=bits, granularity="tensor")
    a, b = x.min().double(), x.max().double()
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    s = (b - a) / (high - low)
    z = torch.round((b * low - a * high) / (b - a))
    assert float(scale) == pytest.approx(float(s), rel=1e-6)
    assert int(zero_point) == int(z)
    assert zero_point.dtype == torch.int32
    expected = (torch.round(x.double() / s + z).clamp(low, high) - z) * s
    back = memkern.dequantize_affine(codes, scale, zero_point, granularity="tensor")
    assert (back - expected).abs().max() < 1e-5  # roundings to fp32
    assert (back - x).abs().max() <= 0.5001 * s + 1e-6 or bits == 4
    assert (codes.min(), codes.max()) == (low, high)


@pytest.mark.pairwise
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("granularity", ["block", "channel", "tensor"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_within_a_step(bits: int, granularity: str, shape: Any, dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 3 + 1).to(dtype)
    codes, scale, zero_point = memkern.quantize_affine(x, bits=bits, granularity=granularity)
    assert scale.shape == zero_point.shape
    back = memkern.dequantize_affine(codes, scale, zero_point, granularity=granularity)
    assert back.shape == x.shape
    if x.numel():
        # rounding the zero point moves the range by up to half a step, which clips one end
        assert (back - x.float()).abs().max() <= 1.01 * scale.max()


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e5, 1e8, -1e30])
@pytest.mark.parametrize("width", [1e-30, 1e-3, 1.0, 1e6])
def test_ranges_far_from_zero_have_errors_within_a_step(offset: float, width: float) -> None:
    x = offset + width * torch.rand(8, 256)
    back = there_and_back(x)
    assert back.isfinite().all()
    step = torch.maximum((x.max() - x.min()) / 255, x.abs().max() / 2**20)  # 2**20: FARTHEST of memkern.quant.affine
    assert (back - x).abs().max() <= 1.6 * step + 1e-38


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.7, 1e-30, -1e30, 12345.678])
def test_constant_blocks_are_exact(bits: int, value: float) -> None:
    x = torch.full((3, 200), value)
    assert torch.equal(there_and_back(x, bits=bits), x)


def test_non_finite_values_stay_out_of_the_range() -> None:
    x = torch.linspace(-1, 1, 128)
    x[3], x[50], x[51] = math.nan, math.inf, -math.inf
    codes, scale, _ = memkern.quantize_affine(x)
    assert float(scale) == pytest.approx(2 / 255)
    assert (int(codes[50]), int(codes[51])) == (127, -128)
    back = there_and_back(x)
    assert abs(float(back[3])) <= 2 / 255


def test_the_memory_format_stays() -> None:
    x = torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)
    codes, _, _ = memkern.quantize_affine(x)
    assert codes.stride() == x.stride()
    assert (there_and_back(x) - x).abs().max() < 0.05  # about two steps
    assert torch.equal(there_and_back(x), there_and_back(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


X = torch.randn(4, 8)
CODES = memkern.quantize_affine(X)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: memkern.quantize_affine(X, bits=3), ValueError, "bits must be one of 8, 4, got 3"),
        (lambda: memkern.quantize_affine(X, granularity="row"), ValueError, "granularity must be one of 'block'"),
        (lambda: memkern.quantize_affine(X, block_size=7), ValueError, "block_size must be"),
        (lambda: memkern.quantize_affine(X.double()), TypeError, "x must be float32"),
        (lambda: memkern.quantize_affine(X[:, ::2]), ValueError, "a dense tensor is needed"),
        (lambda: memkern.quantize_affine(X.t(), granularity="channel"), ValueError, "needs a contiguous"),
        (lambda: memkern.dequantize_affine(X, *CODES[1:]), TypeError, "codes must be torch.int8"),
        (lambda: memkern.dequantize_affine(*CODES, granularity="channel"), ValueError, r"must have shape \(4,\)"),
        (lambda: memkern.dequantize_affine(*CODES[:2], CODES[1]), TypeError, "zero_point must be int32"),
        (lambda: memkern.dequantize_affine(CODES[0], X.double(), CODES[2]), TypeError, "scale must be float32"),
        (lambda: memkern.dequantize_affine(*CODES, dtype=torch.float64), TypeError, "dtype must be float32"),
    ],
)
def test_bad_input_is_refused(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_optimizers_refuse_the_affine_codec_with_the_reason() -> None:
    with pytest.raises(ValueError, match="small second moments become 0"):
        memkern.optim.AdamW8bit([torch.nn.Parameter(torch.ones(8))], codec="affine")


# ---- values at the edges


def assert_within_a_step(x: Tensor, **options: Any) -> None:
    """Finite values come back with an error of at most the largest scale."""
    _, scale, _ = memkern.quantize_affine(x, **options)
    assert scale.isfinite().all()
    assert (scale > 0).all()
    back = there_and_back(x, **options)
    finite = x.isfinite()
    # The last code may stand for more than the largest float.
    back = back.nan_to_num(nan=math.nan, posinf=3.4028234663852886e38, neginf=-3.4028234663852886e38)
    error = (back.double() - x.double()).abs()[finite]
    assert (error <= 1.02 * scale.max().double() + 1e-6 * x[finite].abs().double()).all()
    assert back[x.isnan()].isfinite().all()


@pytest.mark.parametrize("bits", [8, 4])
def test_values_beside_every_boundary_have_errors_within_a_step(bits: int) -> None:
    """Halfway between two codes, and three units in the last place to both sides; ranges near and far from zero."""
    codes = torch.arange(2**bits) + 0.5
    for a, b in ((0.0, 1.0), (-3.0, 5.0), (1e3, 1e3 + 1), (-1e30, 1e30), (-3e38, 3e38)):
        step = (torch.tensor(b).double() - a) / (2**bits - 1)
        near = (a + codes.double() * step).float()
        x = (near.view(torch.int32)[:, None] + torch.arange(-3, 4)).view(torch.float32).clamp(a, b)
        x = torch.cat([x, torch.tensor([[a, b]]).expand(len(x), 2)], 1).contiguous()
        assert_within_a_step(x, bits=bits, block_size=16)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "values",
    [
        [0.0, -0.0],
        [-0.0],
        [3.4028234663852886e38, -3.4028234663852886e38],
        [1e-45, -1e-45],
        [1e-45],
        [math.nan],
        [math.inf, -math.inf],
        [math.nan, math.inf, 7.0],
        [1e8, 1e8 + 8],
        [-1e30, -1e30 * (1 + 1e-6), math.nan],
    ],
    ids=str,
)
def test_extreme_blocks(bits: int, values: list[float]) -> None:
    x = torch.tensor(values).repeat(40)[None]
    for granularity in ("block", "tensor"):
        assert_within_a_step(x, bits=bits, granularity=granularity)


@pytest.mark.full
@pytest.mark.parametrize(("bits", "granularity"), [(4, "block"), (8, "channel")])
def test_compile_without_a_graph_break(bits: int, granularity: str) -> None:
    def back(x: Tensor) -> Tensor:
        return there_and_back(x, bits=bits, granularity=granularity)

    torch._dynamo.reset()
    compiled = torch.compile(back, fullgraph=True, backend="eager")
    for shape in ((4, 256), (5, 300)):
        x = torch.randn(shape)
        assert torch.equal(compiled(x), back(x))
