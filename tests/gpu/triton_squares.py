"""Triton's sums of squares for devices with slow fp64 are within BOUND. test_triton.py runs this in the interpreter.

Those of devices with fast fp64 are tested in tests/kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

import memkern.triton
from memkern import reference
from memkern.schemas import StepArgs
from memkern.triton import grad_norm, launch_step, squares
from memkern.triton.launch import TILE, rows_of
from memkern.triton.tensor_table import FLAT_BLOCK
from tests.support.helpers import FLOATS, LAYOUTS, hard
from tests.support.interpreted import interpreted
from tests.support.kernels.arguments import LAYERWISE, MIXED, step_args

pytestmark = interpreted()

# Relative error of a norm. Its square has twice that: a product and two additions are rounded to fp32. Required: 1e-7.
BOUND = 1.5 * 2**-24


@pytest.fixture(autouse=True)
def slow_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (grad_norm, launch_step):
        monkeypatch.setattr(module, "slow_fp64", lambda _device: True)


def norm_of(*grads: Tensor) -> float:
    norm = torch.full((), -1.0, dtype=torch.float64)
    memkern.triton.grad_norm_(norm, grads)
    return norm.item()


def truth_of(*grads: Tensor) -> float:
    return torch.cat([g.double().flatten() for g in grads]).norm().item()


def worst_four(sign: int) -> Tensor:
    """The four of 2^18 random fours whose three roundings add up to the most, upwards (1) or downwards (-1)."""
    x = torch.rand((1 << 18, 4), generator=torch.Generator().manual_seed(0)) + 1
    a, b, c, d = x.square().unbind(1)
    truth = x.double().square().sum(1)
    error = (((a + c) + (b + d)).double() - truth) / truth
    return x[(sign * error).argmax()]


def of_all_magnitudes(n: int) -> Tensor:
    return hard((n,), 3).sign() * 10.0 ** torch.empty(n).uniform_(-44, 38)


def mostly(value: float, elsewhere: float, n: int = 20_000) -> Tensor:
    """Normal numbers times ``value``; the first of every ten tiles is ``elsewhere``."""
    x = torch.randn(n) * value
    x[:: 10 * TILE] = elsewhere
    return x


SIZES = [1, 3, 4, 1000, 1023, 1027, 17 * TILE + 5, 40 * TILE]  # a program takes 16 tiles
VALUES: dict[str, Callable[[], list[Tensor]]] = {
    **{f"of {n}": lambda n=n: [torch.randn(n)] for n in SIZES},
    **{f"1e{k}": lambda k=k: [torch.randn(3000) * float(f"1e{k}")] for k in range(-45, 38, 5)},
    **{f"all {x}": lambda x=x: [torch.full((3001,), x)] for x in (1.0, 1.1, -3e-18, 7e18, 1 + 2.0**-12, 3e38)},
    "at the range's ends": lambda: [torch.full((1025,), 2.0**k) for k in (-51, -50, 60, 61)],
    "below the range's ends": lambda: [torch.full((1025,), 2.0**k * (1 - 2.0**-24)) for k in (-50, 61)],
    "zeros": lambda: [torch.zeros(3000), -torch.zeros(7)],
    "nothing": lambda: [torch.zeros(0)],
    "subnormal": lambda: [torch.randn(3000) * 1e-40, torch.tensor([2.0**-149])],
    "of all magnitudes": lambda: [of_all_magnitudes(5003)],
    "large ones among small ones": lambda: [mostly(1e-25, 1e10)],
    "small ones among zeros": lambda: [mostly(0.0, 1e-30)],
    "every dtype, unaligned": lambda: [torch.randn(4001, dtype=t)[1:] for t in FLOATS],
    "half precision": lambda: [torch.randn(4000, dtype=t) * 1e-4 for t in FLOATS],
}


@pytest.mark.parametrize("values", VALUES)
def test_norms(values: str) -> None:
    torch.manual_seed(0)
    grads = VALUES[values]()
    assert norm_of(*grads) == pytest.approx(truth_of(*grads), rel=BOUND, abs=0)


@pytest.mark.parametrize("sign", [1, -1], ids=["up", "down"])
def test_roundings_that_add_up(sign: int) -> None:
    grad = worst_four(sign).repeat(2000)
    error = norm_of(grad) / truth_of(grad) - 1
    assert 0.5 * BOUND < sign * error <= BOUND  # an error this large shows that they were summed in fp32


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("elsewhere", [1.0, 1e-30, 1e30, 0.0])
def test_norms_that_are_not_finite(bad: float, elsewhere: float) -> None:
    grad = torch.full((3000,), elsewhere)
    grad[1500] = bad
    assert str(norm_of(grad)) == str(abs(bad))
    grad[1501] = torch.inf
    grad[1499] = torch.nan
    assert str(norm_of(grad)) == "nan"


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        *((x, tl.float32) for x in (0.0, -0.0, 2.0**-50, 1.0, 2.0**60)),
        *((x, tl.float64) for x in (2.0**-149, 2.0**-51, 2.0**61, torch.inf, torch.nan)),
    ],
)
def test_only_values_that_fp32_cannot_square_take_fp64(
    value: float, dtype: tl.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes, sums_of_four = [], squares._sums_of_four

    def note_dtype(x: Any, *shape: Any) -> Any:
        dtypes.append(x.dtype)
        return sums_of_four(x, *shape)

    monkeypatch.setattr(squares, "_sums_of_four", note_dtype)
    norm_of(torch.full((2 * TILE,), value))
    assert dtypes == [dtype] * 2


def test_with_fast_fp64_each_square_is_added_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_norm, "slow_fp64", lambda _device: False)
    grad = hard((16 * TILE,), 1)  # one program
    total = torch.zeros(rows_of(FLAT_BLOCK), FLAT_BLOCK, dtype=torch.float64)
    for tile in grad.split(TILE):
        total += tile.double().square().reshape(total.shape)
    assert norm_of(grad) == total.numpy().sum(1).sum().item() ** 0.5


# ---- norms of layers


def scaled(args: StepArgs, p: float, g: float) -> StepArgs:
    """Parameters times ``p``, gradients and first moments times ``g``; what is not finite becomes 1 before that."""
    coded = sum(m.dtype != torch.float32 for m in args.moment(0))
    first = len(args.moment(0))
    return args._replace(
        params=[x * p for x in args.params],
        grads=[x.nan_to_num(1, 1, 1) * g for x in args.grads],
        moments=[x * g if i < first and x.dtype == torch.float32 else x for i, x in enumerate(args.moments)],
        scales=[x * g if i < coded else x for i, x in enumerate(args.scales)],
    )


FP32: dict[str, Any] = {"layouts": ("odd", "odd", "whole blocks", "whole blocks", "unaligned", "long rows")}
SCALES = [(1.0, 1.0), (1e-30, 1e-30), (1e-25, 1.0), (1e-15, 1e-25), (1e-42, 1e-5), (1e15, 1.0), (1e30, 1e-30)]


@pytest.mark.parametrize(("p", "g"), SCALES)  # the factors of scaled()
@pytest.mark.parametrize("name", LAYERWISE)
def test_norms_of_layers(name: str, p: float, g: float) -> None:
    options = {"layouts": [*LAYOUTS], **MIXED} if p == g == 1.0 else FP32
    args = scaled(step_args(name, **options), p, g)
    actual, truth = (torch.zeros(len(args.params), 2, dtype=torch.float64) for _ in range(2))
    for backend, sums in ((memkern.triton, actual), (reference, truth)):
        getattr(backend, name)(args._replace(squares=sums, squares_only=True))
    assert truth.isfinite().all()
    torch.testing.assert_close(actual.sqrt(), truth.sqrt(), rtol=BOUND, atol=0)


@pytest.mark.parametrize("name", LAYERWISE)
def test_trust_ratios(name: str) -> None:
    actual, expected = step_args(name, **FP32), step_args(name, **FP32)
    getattr(memkern.triton, name)(actual)
    getattr(reference, name)(expected)
    for ratios, truth in zip(actual.trust_ratios, expected.trust_ratios, strict=True):
        # A quotient of two norms, rounded to fp32.
        torch.testing.assert_close(ratios, truth, rtol=2 * BOUND + 2**-23, atol=0)
