"""memkern.quantize_affine: the formula, its edges, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import memkern
from memkern.quant.layout import memory_order
from tests.support.examples import given, settings, st
from tests.support.helpers import (
    FLOATS,
    assert_same,
    at,
    fast_here,
    hard,
    on,
    over_dtypes,
    over_fast,
    over_layouts,
    tensor,
)
from tests.support.interpreted import interpreted

SHAPES = [(), (1,), (7,), (3, 5), (4, 300), (2, 3, 128), (0, 4)]


def there_and_back(x: Tensor, **options: Any) -> Tensor:
    codes, scale, zero_point = memkern.quantize_affine(x, **options)
    options.pop("range", None), options.pop("rounding", None), options.pop("seed", None)
    return memkern.dequantize_affine(codes, scale, zero_point, shape=x.shape, **options)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_formula(bits: int) -> None:
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
    back = memkern.dequantize_affine(codes, scale, zero_point, bits=bits, granularity="tensor", shape=x.shape)
    assert (back - expected).abs().max() < 1e-5
    assert (back - x).abs().max() <= 0.5001 * s + 1e-6 or bits == 4
    assert codes.nbytes == x.numel() * bits // 8


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("granularity", ["block", "channel", "tensor"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_within_a_step(bits: int, granularity: str, shape: Any, dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 3 + 1).to(dtype)
    codes, scale, zero_point = memkern.quantize_affine(x, bits=bits, granularity=granularity)
    assert scale.shape == zero_point.shape
    back = memkern.dequantize_affine(
        codes, scale, zero_point, bits=bits, granularity=granularity, shape=x.shape
    )
    assert back.shape == x.shape
    if x.numel():
        # rounding the zero point moves the range by up to half a step, which clips one end
        assert (back - x.float()).abs().max() <= 1.01 * scale.max()


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e5, 1e8, -1e30])
@pytest.mark.parametrize("width", [1e-30, 1e-3, 1.0, 1e6])
def test_ranges_far_from_zero(offset: float, width: float) -> None:
    x = offset + width * torch.rand(8, 256)
    back = there_and_back(x)
    assert back.isfinite().all()
    step = torch.maximum((x.max() - x.min()) / 255, x.abs().max() / 2**20)
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


def test_a_given_range_clips() -> None:
    x = torch.tensor([-5.0, 0.0, 0.25, 1.0, 7.0])
    back = there_and_back(x, range=(0.0, 1.0), granularity="tensor")
    torch.testing.assert_close(back, x.clamp(0, 1), rtol=0, atol=0.5 / 255 + 1e-6)


def test_stochastic_rounding_has_no_bias() -> None:
    x = torch.rand(64, 128)
    nearest = there_and_back(x)
    one = there_and_back(x, rounding="stochastic", seed=1)
    assert not torch.equal(one, nearest)
    assert torch.equal(one, there_and_back(x, rounding="stochastic", seed=1))
    mean = sum(there_and_back(x, rounding="stochastic", seed=seed) for seed in range(64)) / 64
    assert (mean - x)[x < x.amax(1, True)].abs().mean() < 0.35 * (one - x).abs().mean()


def test_layout_in_memory_stays() -> None:
    x = torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)
    codes, _, _ = memkern.quantize_affine(x)
    assert codes.stride() == x.stride()
    assert (there_and_back(x) - x).abs().max() < 0.05
    assert torch.equal(there_and_back(x), there_and_back(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


@pytest.mark.parametrize(
    "x", [torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last), torch.randn(40, 131).t()]
)
def test_four_bits_of_any_strides(x: Tensor) -> None:
    assert torch.equal(there_and_back(x, bits=4), there_and_back(x.contiguous(), bits=4))
    assert (there_and_back(x, bits=4) - x).abs().max() < 0.5


X = torch.randn(4, 8)
CODES = memkern.quantize_affine(X)
FOUR = memkern.quantize_affine(X, bits=4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: memkern.quantize_affine(X, bits=3), ValueError, "bits must be one of 8, 4, got 3"),
        (
            lambda: memkern.quantize_affine(X, granularity="row"),
            ValueError,
            "granularity must be one of 'block'",
        ),
        (lambda: memkern.quantize_affine(X, rounding="up"), ValueError, "rounding must be one of 'nearest'"),
        (lambda: memkern.quantize_affine(X, range=(1.0, 0.0)), ValueError, "the smaller one first"),
        (lambda: memkern.quantize_affine(X, range=3), ValueError, "a pair of numbers, got 3"),
        (lambda: memkern.quantize_affine(X, range=(0, math.inf)), ValueError, "range must be finite"),
        (lambda: memkern.quantize_affine(X, block_size=7), ValueError, "block_size must be"),
        (lambda: memkern.quantize_affine(X.double()), TypeError, "x must be float32"),
        (lambda: memkern.quantize_affine(X[:, ::2]), ValueError, "a dense tensor is needed"),
        (lambda: memkern.quantize_affine(X.t(), granularity="channel"), ValueError, "needs a contiguous"),
        (lambda: memkern.dequantize_affine(*FOUR, bits=4), ValueError, "shape must be given for bits=4"),
        (
            lambda: memkern.dequantize_affine(*FOUR, bits=4, shape=(5,)),
            ValueError,
            "shape must fit the codes",
        ),
        (lambda: memkern.dequantize_affine(*FOUR), TypeError, "codes must be torch.int8 for bits=8"),
        (
            lambda: memkern.dequantize_affine(*CODES, granularity="channel"),
            ValueError,
            r"scale must have shape \(4,\)",
        ),
        (
            lambda: memkern.dequantize_affine(CODES[0], CODES[1], CODES[2].float()),
            TypeError,
            "zero_point must be int32",
        ),
        (lambda: memkern.dequantize_affine(*CODES, dtype=torch.float64), TypeError, "dtype must be float32"),
    ],
)
def test_bad_input(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_optimizers_refuse_it_with_the_reason() -> None:
    with pytest.raises(ValueError, match="small second moments become 0"):
        memkern.optim.AdamW8bit([torch.nn.Parameter(torch.ones(8))], codec="affine")


# ---- every backend


def both(x: Tensor, backend: str, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and zero point of a backend, and values back: the reference's, in every bit."""
    with on(backend):
        actual = memkern.quantize_affine(at(x, backend), **options)
    with on("reference"):
        expected = memkern.quantize_affine(x, **options)
    assert_same(actual, expected, f"codes, scale, zero_point of {backend}")
    kept = {key: options[key] for key in ("bits", "granularity", "block_size") if key in options}
    for dtype in FLOATS:
        with on(backend):
            back = memkern.dequantize_affine(*actual, shape=x.shape, dtype=dtype, **kept)
        with on("reference"):
            truth = memkern.dequantize_affine(*expected, shape=x.shape, dtype=dtype, **kept)
        assert_same(back, truth, f"values of {backend}")
    return actual


def spoiled(x: Tensor) -> Tensor:
    """With NaN, infinities, a constant stretch and one far from zero, where there is room."""
    flat = memory_order(x)
    if x.numel() > 900:
        flat[3], flat[500], flat[700] = math.nan, math.inf, -math.inf
        flat[512:640] = 2.75
        flat[768:896] += 4096
    return x


@interpreted(layout=("odd", "short rows", "channels_last", "0-dim", "empty", "unaligned", "one long row"))
@over_fast
@over_layouts
@over_dtypes
@pytest.mark.parametrize("bits", [8, 4])
def test_backends_give_the_same_bits(backend: str, layout: str, dtype: torch.dtype, bits: int) -> None:
    x = spoiled(tensor(layout, dtype, scale=1.0))
    both(x, backend, bits=bits)
    both(x, backend, bits=bits, rounding="stochastic", seed=41)
    both(x, backend, bits=bits, range=(-0.5, 1.25))
    for granularity in ("channel", "tensor"):
        if granularity == "tensor" or x.is_contiguous():
            both(x, backend, bits=bits, granularity=granularity)
            both(x, backend, bits=bits, granularity=granularity, rounding="stochastic")


@interpreted(block_size=(8, 72, 256))
@over_fast
@pytest.mark.parametrize("block_size", [8, 24, 72, 256, 1000, 4096])
@pytest.mark.parametrize("bits", [8, 4])
def test_block_sizes(backend: str, block_size: int, bits: int) -> None:
    for x in (hard((3, 4500), 0, scale=1.0), hard((3, 751), 1, scale=1.0), hard((40, 15), 2, scale=1.0)):
        both(spoiled(x), backend, bits=bits, block_size=block_size)


@interpreted()
@over_fast
@pytest.mark.parametrize("bits", [8, 4])
def test_beside_every_boundary(backend: str, bits: int) -> None:
    """Halfway between two codes, and three units in the last place to both sides; ranges near and far from zero."""
    codes = torch.arange(2**bits) + 0.5
    for a, b in ((0.0, 1.0), (-3.0, 5.0), (1e3, 1e3 + 1), (-1e30, 1e30), (-3e38, 3e38), (1e-40, 3e-40)):
        step = (torch.tensor(b).double() - a) / (2**bits - 1)
        near = (a + codes.double() * step).float()
        x = (near.view(torch.int32)[:, None] + torch.arange(-3, 4)).view(torch.float32).clamp(a, b)
        x = torch.cat([x, torch.tensor([[a, b]]).expand(len(x), 2)], 1).contiguous()
        both(x, backend, bits=bits, block_size=16)
        both(x, backend, bits=bits, granularity="channel", rounding="stochastic")


@interpreted()
@over_fast
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
def test_extreme_blocks(backend: str, bits: int, values: list[float]) -> None:
    x = torch.tensor(values).repeat(40)[None]
    for rounding in ("nearest", "stochastic"):
        made = both(x, backend, bits=bits, rounding=rounding)
        both(x, backend, bits=bits, rounding=rounding, granularity="tensor")
        assert made[1].isfinite().all()
        assert (made[1] > 0).all()


@settings(max_examples=200)
@given(
    bits=st.sampled_from([8, 4]),
    words=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=80),
    block_size=st.sampled_from([8, 16, 64]),
    seed=st.one_of(st.none(), st.integers(-(2**40), 2**40)),
)
def test_backends_agree_on_any_values(bits: int, words: list[int], block_size: int, seed: int | None) -> None:
    x = torch.tensor(words, dtype=torch.int64).to(torch.int32).view(torch.float32)[None]
    rounding = {"rounding": "nearest"} if seed is None else {"rounding": "stochastic", "seed": seed}
    for backend in fast_here():
        both(x, backend, bits=bits, block_size=block_size, **rounding)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x, threads, results = hard((64, 4097), 0), torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append([*memkern.quantize_affine(x, bits=4), *memkern.quantize_affine(x)])
    finally:
        torch.set_num_threads(threads)
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.full
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("granularity", ["block", "channel", "tensor"])
def test_one_graph(bits: int, granularity: str) -> None:
    def back(x: Tensor) -> Tensor:
        return there_and_back(x, bits=bits, granularity=granularity)

    torch._dynamo.reset()
    compiled = torch.compile(back, fullgraph=True, backend="eager")
    for shape in ((4, 256), (5, 300)):
        x = torch.randn(shape)
        assert torch.equal(compiled(x), back(x))
