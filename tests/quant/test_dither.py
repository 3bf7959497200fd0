"""Signed power codes with a dither are unbiased, and the same from any approximate root, also beside every square."""

import math
from fractions import Fraction

import pytest
import torch

import memkern
from memkern.quant import codec as C
from memkern.reference.blockwise import round_signed
from tests.support.helpers import (
    assert_same,
    at,
    hard,
    on,
    over_all,
    over_dtypes,
    over_fast,
)
from tests.support.interpreted import interpreted

N = C.POWER_LEVELS_SIGNED
ROOT_ERROR = 6  # the relative error of a backend's square root, in units of 2^-24


def around_square(k: int) -> torch.Tensor:
    """Every float that a root with an error of up to ROOT_ERROR may put on the wrong side of k^2."""
    a = (torch.tensor(float(k * k)).view(torch.int32) + torch.arange(-32, 33)).int().view(torch.float32)
    return a[(a.double() / k**2 - 1).abs() <= 2 * ROOT_ERROR * 2.0**-24]


# Values of the dither u, of 24 bits: near 0, near 1 and in between.
DITHERS = torch.cat([torch.arange(2048), torch.arange(2**24 - 2048, 2**24), torch.arange(0, 2**24, 8191)])
DITHERS = DITHERS.float() * 2.0**-24


def codes_from(a: torch.Tensor, q: torch.Tensor | float, u: torch.Tensor) -> torch.Tensor:
    """The formula of round_signed with a given q in place of the rounded-down root."""
    bound = 1 - u.clamp(C.DITHER_CLAMP, 1 - C.DITHER_CLAMP)
    q = torch.as_tensor(q, dtype=torch.float32)
    return q + (a - q * q >= bound * (2 * q + 1)).float()


def test_a_root_that_is_off_beside_a_square_ends_in_the_same_code() -> None:
    for k in range(1, N + 1):
        a = around_square(k)[:, None]
        assert len(a) >= 12
        assert (a < k * k).any()
        assert (a > k * k).any()
        expected = round_signed(a, DITHERS[None])
        for q in (k - 1, k):
            assert torch.equal(codes_from(a, q, DITHERS[None]), expected)
        assert (expected == k).all()  # with u clamped no dither moves what is next to a square


def test_without_the_clamp_of_u_roots_would_give_other_codes() -> None:
    # Shows that the test above can fail.
    a = around_square(100)[:, None]
    codes = [99.0 + (a - 99.0**2 >= (1 - DITHERS) * 199), 100.0 + (a - 100.0**2 >= (1 - DITHERS) * 201)]
    assert not torch.equal(*codes)


@pytest.mark.parametrize("q", [1, 7, 64, 126])
def test_round_signed_is_the_formula_in_exact_arithmetic(q: int) -> None:
    rng = torch.Generator().manual_seed(q)
    a = q * q + torch.rand(400, generator=rng) * (2 * q + 1)
    u = torch.randint(0, 2**24, (400,), generator=rng).float() * 2.0**-24
    for a_i, u_i, code in zip(a.tolist(), u.tolist(), round_signed(a, u).tolist(), strict=True):
        low = math.isqrt(math.floor(Fraction(a_i)))
        bound = (1 - Fraction(min(max(u_i, C.DITHER_CLAMP), 1 - C.DITHER_CLAMP))) * (2 * low + 1)
        difference = Fraction(a_i) - low * low
        if abs(difference - bound) > bound * Fraction(1, 2**24):  # where the rounded product decides alike
            assert code == low + (difference >= bound)


@over_dtypes
@pytest.mark.parametrize("step", [0, 1, 12345])
def test_signed_codes_with_a_step_are_one_of_the_two_around(dtype: torch.dtype, step: int) -> None:
    x = hard((16, 1024), 0).to(dtype)
    with on("reference"):
        codes, scale = memkern.quantize_blockwise(x, step=step)
    s = scale.double().repeat_interleave(128, 1)
    a = (x.double().abs() * (N**2 / s.clamp_min(2.0**-149))).clamp(max=float(N**2))
    q = codes.double()
    assert ((q == 0) | (q.sign() == x.double().sign())).all()
    slack = 1e-3 * 2.0**-9  # for the rounding of a and of its root
    assert (q.abs() >= (a.sqrt() - slack).floor()).all()
    assert (q.abs() <= (a.sqrt() + slack).ceil()).all()


@pytest.mark.full
def test_values_stored_over_many_steps_are_unbiased() -> None:
    x = hard((4, 128), 3).clamp(-1, 1)
    steps = 4000
    total = torch.zeros(4, 128, dtype=torch.float64)
    for step in range(1, steps + 1):
        codes, scale = memkern.quantize_blockwise(x, step=step)
        total += memkern.dequantize_blockwise(codes, scale).double()
    error = (total / steps - x.double()).abs()
    # Evenly spread offsets miss a share of the steps by about log(steps) / steps; what u decides is one code's width.
    unit = scale.double() / N**2
    width = 2 * (x.double().abs() / unit).sqrt() + 1
    usable = scale.double() > 1e-30  # blocks with a scale below 1e-34 are stored as zeros
    assert ((error <= 0.005 * width * unit + 1e-6 * x.double().abs()) | ~usable).all()
    nearest = memkern.dequantize_blockwise(*memkern.quantize_blockwise(x)).double()
    assert ((nearest - x.double()).abs() > 0.1 * width * unit).any()  # so the line above can fail


INF, NAN = math.inf, math.nan


@interpreted(step=(1,))
@over_all
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize(
    "values",
    [[0.0, -0.0], [NAN, 1.0, -0.25], [INF, 1.0, -INF, 0.25], [NAN, INF], [1e-40, -1e-41], [1e30, 2.0**-149]],
    ids=str,
)
def test_zeros_and_values_that_are_not_finite_have_code_0(backend: str, step: int, values: list[float]) -> None:
    x = torch.tensor([values + [0.0] * 14])
    with on(backend):
        codes, scale = memkern.quantize_blockwise(at(x, backend), step=step)
    with on("reference"):
        assert_same((codes, scale), memkern.quantize_blockwise(x, step=step))
    usable = max((abs(v) for v in values if math.isfinite(v)), default=0) > 1e-34  # else N^2 / scale overflows
    for v, q in zip(values, codes[0].tolist(), strict=False):
        if not math.isfinite(v) or v == 0 or not usable:
            assert q == 0
    assert (codes[0, len(values) :] == 0).all()
    assert codes.max() <= N
    assert codes.min() >= -N


@over_fast
@over_dtypes
def test_code_128_never_arises(backend: str, dtype: torch.dtype) -> None:
    # The largest value of a block times N^2 / s may pass N^2 by some ulps.
    x = torch.rand(2048, 8, generator=torch.Generator().manual_seed(0)).add(0.5).to(dtype)
    x[:] = x[:, :1]
    for step in range(1, 40):
        with on(backend):
            codes, _ = memkern.quantize_blockwise(at(x, backend), block_size=8, step=step)
        assert (codes == N).all()


@interpreted()
@over_all
def test_a_positive_second_moment_keeps_a_code_above_zero_in_the_dynamic_map(backend: str) -> None:
    # With a step the op rounds as the optimizers do; the public function rounds to the nearest.
    from memkern import _ops

    x = torch.tensor([[1.0, 1e-9, 0.0, 3e-8, 2.0**-149, 1e-3, NAN, 0.5]])
    with on(backend):
        codes, scale = _ops.quantize_blockwise(at(x, backend), "dynamic", False, 8, 1)
        nearest, _ = memkern.quantize_blockwise(at(x, backend), codec="dynamic", signed=False, block_size=8)
        signed, _ = _ops.quantize_blockwise(at(x, backend), "dynamic", True, 8, 1)
        public, _ = memkern.quantize_blockwise(at(x, backend), codec="dynamic", block_size=8)
    assert scale.item() == 1
    assert codes[0].tolist() == [255, 1, 0, 1, 1, nearest[0, 5].item(), 255, nearest[0, 7].item()]
    assert nearest[0, :5].tolist() == [255, 0, 0, 0, 0]
    assert_same(signed, public)
    with on(backend):
        zeros, _ = _ops.quantize_blockwise(at(torch.full((1, 8), 1e-40), backend), "dynamic", False, 8, 1)
    assert (zeros == 0).all()  # its factor overflows
