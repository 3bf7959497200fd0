"""memkern.quantize_blockwise and dequantize_blockwise give equal bits on all backends, also of extreme blocks."""

import math
from itertools import product

import numpy as np
import pytest
import torch

import memkern
from memkern import _ops
from memkern.quant import codec as C
from memkern.reference import blockwise
from tests.support.helpers import (
    CODECS,
    FLOATS,
    assert_same,
    at,
    fast_here,
    hard,
    on,
    over_all,
    over_codecs,
    over_cpu,
    over_dtypes,
    over_signs,
    tensor,
)
from tests.support.interpreted import interpreted
from tests.support.property_tests import example, given, settings, st

FLT_MAX = torch.finfo(torch.float32).max
TINIEST = 2.0**-149  # the least fp32 denormal


def quantize_as_reference(x: torch.Tensor, backend: str, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale) of a backend, which are asserted to be the reference's in every bit."""
    with on(backend):
        actual = memkern.quantize_blockwise(at(x, backend), **options)
    with on("reference"):
        assert_same(actual, memkern.quantize_blockwise(x, **options), f"codes and scale of {backend}")
    return actual


# ---- mark_nonfinite


@pytest.mark.pairwise
@over_codecs
@over_signs
@over_dtypes
@pytest.mark.parametrize("block_size", [128, 1024, 24])
@pytest.mark.parametrize("layout", ["odd", "whole blocks"])
def test_a_mark_for_what_codes_cannot_hold(
    codec: str, signed: bool, dtype: torch.dtype, block_size: int, layout: str
) -> None:
    """A scale of NaN and codes 0 for blocks with NaN or inf; other blocks are coded as they are without marks."""
    x = tensor(layout, dtype).clone()
    flat = x.view(-1)
    for i, value in enumerate((math.nan, math.inf, -math.inf, torch.finfo(dtype).max, 0.0)):
        flat[150 * i + 5] = value
    with on("reference"):
        codes, scale = _ops.quantize_blockwise(x, codec, signed, block_size, None)
        marked_codes, marked_scale = _ops.quantize_blockwise(x, codec, signed, block_size, None, mark_nonfinite=True)
        back = memkern.dequantize_blockwise(marked_codes, marked_scale, codec=codec, block_size=block_size)
    not_coded = ~x.isfinite() if signed else x.isnan() | (x == math.inf)
    assert bool(back[not_coded].isnan().all())
    assert 0 < int(marked_scale.isnan().sum()) <= int(not_coded.sum())
    coded = ~back.isnan()
    assert bool(back.isfinite()[coded].all())
    assert_same(marked_codes[coded], codes[coded], "codes of other blocks")
    unmarked = ~marked_scale.isnan()
    assert_same(marked_scale[unmarked], scale[unmarked].clamp_max(C.LARGEST_MARKED_SCALE), "scales of other blocks")


# ---- any values


def from_bits(bits: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32).copy())


any_fp32 = st.integers(0, 2**32 - 1)
# Bits of numbers that one block may well hold: (exponent - the block's, mantissa, sign) of each.
block_like = st.builds(
    lambda exponent, numbers: [min(max(exponent + e, 0), 254) << 23 | m | sign << 31 for e, m, sign in numbers],
    st.integers(0, 254),
    st.lists(st.tuples(st.integers(-20, 0), st.integers(0, 2**23 - 1), st.integers(0, 1)), min_size=1, max_size=80),
)


@settings(max_examples=300)
@given(
    bits=st.one_of(st.lists(any_fp32, min_size=1, max_size=80), block_like),
    codec=st.sampled_from(CODECS),
    signed=st.booleans(),
    step=st.one_of(st.none(), st.integers(0, 2**24)),
    block_size=st.sampled_from([8, 16, 64]),
)
@example(bits=[2**31] * 9, codec="power", signed=False, step=None, block_size=8)  # -0.0 only
def test_backends_agree_on_any_values(
    bits: list[int], codec: str, signed: bool, step: int | None, block_size: int
) -> None:
    x = from_bits(bits)[None]
    step = step if codec == "power" else None
    for backend in fast_here():
        codes, scale = quantize_as_reference(x, backend, codec=codec, signed=signed, block_size=block_size, step=step)
        with on(backend):
            back = memkern.dequantize_blockwise(codes, scale, codec=codec, block_size=block_size)
        with on("reference"):
            assert_same(back, memkern.dequantize_blockwise(codes, scale, codec=codec, block_size=block_size))
        assert back.isfinite().all()


# ---- extreme blocks

INF, NAN = math.inf, math.nan
# values of one block -> scale, signed power codes, unsigned power codes (nearest)
EXTREMES = {
    "zeros": ([0.0, -0.0, 0.0], 0.0, [0, 0, 0], [0, 0, 0]),
    "denormal, the factor overflows": ([1e-40, 0.0, -1e-41], 1e-40, [0, 0, 0], [0, 0, 0]),
    "N^2 / s overflows": ([1e-36, 0.0, -1e-37], 1e-36, [0, 0, 0], [0, 0, 0]),
    "N^2 / s is as large as can be": ([2e-34, -2e-34, 1e-34], 2e-34, [127, -127, 90], [255, 0, 180]),
    "FLT_MAX": ([FLT_MAX, -FLT_MAX, FLT_MAX / 5, 1.0], FLT_MAX, [127, -127, 57, 0], [255, 0, 114, 1]),
    "NaN among others": ([NAN, 1.0, -0.25, 0.0], 1.0, [0, 127, -64, 0], [255, 255, 0, 0]),
    "infinity among others": ([INF, 1.0, -INF, 0.25], 1.0, [0, 127, 0, 64], [255, 255, 0, 128]),
    "NaN only": ([NAN, NAN], 0.0, [0, 0], [0, 0]),
    "infinity only": ([INF, -INF], 0.0, [0, 0], [0, 0]),
    "a huge and a tiny": ([1e30, 1e-30, TINIEST], 1e30, [127, 0, 0], [255, 1, 1]),
    "negative only": ([-2.0, -0.5], 2.0, [-127, -64], [0, 0]),
}


@interpreted()
@over_all
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_blocks(backend: str, name: str) -> None:
    values, scale, *codes = EXTREMES[name]
    in_fp32 = torch.tensor([values + [0.0] * 30])
    for dtype, codec, signed in product(FLOATS, CODECS, (True, False)):
        x = in_fp32.to(dtype)
        fits = torch.equal(x.float(), in_fp32) or name.startswith("NaN")  # NaN is not equal to itself
        q, s = quantize_as_reference(x, backend, codec=codec, signed=signed)
        if fits:
            positive = [v for v in values if math.isfinite(v) and v > 0]
            assert s.item() == np.float32(scale if signed else max(positive, default=0.0)), f"{dtype}, {codec}"
        if fits and codec == "power":
            assert q[0, : len(values)].tolist() == codes[0 if signed else 1], f"{dtype}, {codec}"
        assert (q[0, len(values) :] == 0).all(), f"{dtype}, {codec}"


@over_codecs
@over_signs
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_value_that_is_not_finite_changes_no_other(codec: str, signed: bool, bad: float) -> None:
    x = hard((3, 300), 5, signed=signed)
    spoilt = x.clone()
    spoilt[2, 7] = bad
    x[2, 7] = 0
    codes, scale = memkern.quantize_blockwise(x, codec=codec, signed=signed)
    spoilt_codes, spoilt_scale = memkern.quantize_blockwise(spoilt, codec=codec, signed=signed)
    assert torch.equal(scale, spoilt_scale)
    assert spoilt_codes[2, 7] == (0 if signed or bad < 0 else 255)
    spoilt_codes[2, 7] = codes[2, 7]
    assert torch.equal(codes, spoilt_codes)


@over_cpu
def test_torchs_default_dtype_changes_no_code(backend: str) -> None:
    x = hard((3, 300), 5)
    with on(backend):
        expected = memkern.quantize_blockwise(x, codec="dynamic")
        blockwise._dynamic_tables.cache_clear()
        torch.set_default_dtype(torch.bfloat16)
        try:
            assert_same(memkern.quantize_blockwise(x, codec="dynamic"), expected)
        finally:
            torch.set_default_dtype(torch.float32)
            blockwise._dynamic_tables.cache_clear()


@over_cpu
def test_subnormal_numbers_of_fp16_where_those_of_fp32_are_zero(backend: str) -> None:
    x = torch.arange(1, 9, dtype=torch.int16).view(torch.float16)
    with on(backend):
        expected = memkern.quantize_blockwise(x)
        torch.set_flush_denormal(True)
        try:
            assert_same(memkern.quantize_blockwise(x), expected)
        finally:
            torch.set_flush_denormal(False)
    assert float(expected[1]) == 8 * 2.0**-24


# ---- arguments


def test_by_default_codes_are_signed_and_x_is_unchanged() -> None:
    x = torch.nn.Parameter(torch.randn(4, 256))
    before = x.detach().clone()
    codes, scale = memkern.quantize_blockwise(x)
    assert (codes.dtype, scale.dtype, tuple(scale.shape)) == (torch.int8, torch.float32, (4, 2))
    assert not codes.requires_grad
    assert torch.equal(x.detach(), before)
    back = memkern.dequantize_blockwise(codes, scale)
    assert back.dtype == torch.float32
    # The error of a rounded root: half a code, (2 q + 1/2) / 2 / N^2 of the scale at most.
    assert (back - x.detach()).abs().max() <= scale.max() * 1.01 / 127


BAD = [  # arguments, and the error with its message
    ({"codec": "linear"}, ValueError, "codec must be one of 'power', 'dynamic'"),
    ({"codec": 0}, ValueError, "codec must be one of"),
    *(({"block_size": b}, ValueError, "multiple of 8 from 8 to 4096") for b in (0, 4, 12, 8192, 128.0, True)),
    ({"step": 3, "codec": "dynamic"}, ValueError, "step belongs to power codes, got codec='dynamic'"),
    ({"step": 3, "signed": False, "codec": "dynamic"}, ValueError, "step belongs to power codes"),
    ({"x": torch.ones(8, dtype=torch.float64)}, TypeError, "float32, bfloat16 or float16, got torch.float64"),
    ({"x": torch.ones(8, dtype=torch.int32)}, TypeError, "got torch.int32"),
    ({"x": torch.ones(8, dtype=torch.complex64)}, TypeError, "got torch.complex64"),
    ({"x": torch.eye(4).to_sparse()}, ValueError, "dense"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=lambda v: None)
def test_quantize_refuses_bad_arguments(options: dict, error: type, message: str) -> None:
    options = {"x": torch.ones(8)} | options
    with pytest.raises(error, match=message):
        memkern.quantize_blockwise(options.pop("x"), **options)


I8 = torch.ones(4, 256, dtype=torch.int8)
BAD_BACK = [  # (codes, scale), options, and the error with its message
    ((I8, torch.ones(4, 2)), {"codec": "linear"}, ValueError, "codec must be one of"),
    ((I8, torch.ones(4, 2)), {"block_size": 12}, ValueError, "multiple of 8"),
    ((I8, torch.ones(4, 2)), {"block_size": 64}, ValueError, "scale"),
    ((I8, torch.ones(2, 4)), {}, ValueError, "scale"),
    ((I8, torch.ones(8)), {}, ValueError, "scale"),
    ((I8, torch.ones(0)), {}, ValueError, "scale"),
    ((I8, torch.ones(4, 2, dtype=torch.float64)), {}, ValueError, "scale"),
    ((I8, torch.ones(4, 2, dtype=torch.bfloat16)), {}, ValueError, "scale"),
    ((I8.float(), torch.ones(4, 2)), {}, TypeError, "int8 .*or uint8"),
    ((I8.to(torch.int16), torch.ones(4, 2)), {}, TypeError, "int8 .*or uint8"),
    ((I8, torch.ones(4, 2)), {"dtype": torch.float64}, TypeError, "float32, bfloat16 or float16"),
]


@pytest.mark.parametrize(("args", "options", "error", "message"), BAD_BACK, ids=lambda v: None)
def test_dequantize_refuses_bad_arguments(args: tuple, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        memkern.dequantize_blockwise(*args, **options)


@pytest.mark.parametrize("shapes", [[(4, 256)], [(4, 256), (5, 300), (7, 320)]], ids=["one shape", "changing shapes"])
def test_compile_without_a_graph_break(shapes: list[tuple[int, ...]]) -> None:
    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        return memkern.dequantize_blockwise(*memkern.quantize_blockwise(x))

    torch._dynamo.reset()
    compiled = torch.compile(there_and_back, fullgraph=True, backend="eager")
    for shape in shapes:
        x = torch.randn(shape)
        assert torch.equal(compiled(x), there_and_back(x))
