"""Where derivatives jump, and at the numbers next to it, few-bit activations have torch's derivatives or near ones."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import memkern
from memkern.fewbit.activations import _activation
from memkern.fewbit.tables import LEVELS
from tests.support.activation_helpers import gradients
from tests.support.helpers import FLOATS, fast_here, on, over_dtypes


@pytest.mark.pairwise
@pytest.mark.parametrize("beta", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("threshold", [20.0, 5.0, 1.0, 0.0, -1.0])
@pytest.mark.parametrize("bits", [1, 3, 4])
def test_softplus_has_derivative_1_above_its_threshold(bits: int, threshold: float, beta: float) -> None:
    x = torch.linspace(-8, 8, 1001, requires_grad=True)

    def error(threshold: float) -> Tensor:
        (dx,) = torch.autograd.grad(memkern.functional.softplus(x, beta, threshold, bits=bits).sum(), x)
        (expected,) = torch.autograd.grad(F.softplus(x, beta, threshold).sum(), x)
        return (dx - expected).abs()

    table_error = max(float(error(1e9).max()), 1 - max(LEVELS["softplus", bits].levels))  # 1e9: no threshold
    assert error(threshold).max() < table_error + 1e-6
    if threshold <= 1 and bits > 2:
        assert (error(threshold)[beta * x.detach() > threshold] == 0).all()


# Functions whose derivatives are exact: the name, and the arguments after x. 0.3 and 1.1 are no bf16 numbers.
EXACT: dict[str, tuple[str, tuple[float, ...]]] = {
    "relu": ("relu", ()),
    "leaky_relu": ("leaky_relu", ()),
    "hardtanh": ("hardtanh", ()),
    "hardtanh 0, 6": ("hardtanh", (0.0, 6.0)),
    "hardsigmoid": ("hardsigmoid", ()),
    **{f"hardshrink {lambd}": ("hardshrink", (lambd,)) for lambd in (0.5, 0.3, 1.1, 0.0, -1.0)},
    **{f"softshrink {lambd}": ("softshrink", (lambd,)) for lambd in (0.5, 0.3, 1.1, 0.0)},
    **{f"threshold {threshold}": ("threshold", (threshold, 20.0)) for threshold in (0.5, 0.3, -1.1, 0.0)},
}
LARGEST_ERRORS = {"hardswish": 0.1, "elu": 0.04, "celu": 0.04, "selu": 0.07}
"""Of activations whose derivatives are coded: the largest error with 4 bits."""


def kinks(dtype: torch.dtype) -> Tensor:
    """Numbers where derivatives jump, and their neighbours."""
    jumps = torch.tensor([0.0, 0.3, 0.5, 1.0, 1.1, 3.0, 6.0, torch.inf], dtype=dtype)
    up, down = (jumps.nextafter(torch.full_like(jumps, toward)) for toward in (torch.inf, -torch.inf))
    x = torch.cat([jumps, up, down])
    return torch.cat([x, -x]).requires_grad_()


def both_gradients(name: str, x: Tensor, arguments: Any = (), **options: Any) -> tuple[Tensor, Tensor]:
    """memkern's and torch's gradient of x, for hard values as the output's."""
    functions = functools.partial(getattr(memkern.functional, name), **options), getattr(F, name)
    ours, theirs = (gradients(lambda t, fn=fn: fn(t, *arguments), x)[1] for fn in functions)
    return ours, theirs


@pytest.mark.parametrize("case", EXACT)
def test_exact_derivatives_at_kinks_are_torchs(case: str) -> None:
    """In bf16 and fp16 inputs are often exactly at a kink."""
    name, arguments = EXACT[case]
    for dtype, backend in itertools.product(FLOATS, ("reference", *fast_here()[-1:])):
        with on(backend):
            dx, expected = both_gradients(name, kinks(dtype), arguments)
        assert torch.equal(dx, expected), f"{dtype}, {backend}"


@over_dtypes
@pytest.mark.parametrize("name", LARGEST_ERRORS)
def test_derivatives_at_kinks_are_near_torchs(name: str, dtype: torch.dtype) -> None:
    x = kinks(dtype)
    (dx,) = torch.autograd.grad(getattr(memkern.functional, name)(x, bits=4).sum(), x)
    (expected,) = torch.autograd.grad(getattr(F, name)(x).sum(), x)
    assert (dx - expected).abs().max() < LARGEST_ERRORS[name]


@over_dtypes
@pytest.mark.parametrize(("name", "arguments"), [("elu", (0.3,)), ("elu", (-1.0,)), ("celu", (2.0,)), ("selu", ())])
def test_derivatives_of_elu_right_of_0_are_torchs(name: str, arguments: Any, dtype: torch.dtype) -> None:
    dx, expected = both_gradients(name, torch.linspace(1e-3, 8, 1001).to(dtype), arguments, bits=1)
    assert torch.equal(dx, expected)


# Functions whose tables are made of their arguments or of others, and one whose derivative comes from the output.
MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "hardtanh": memkern.functional.hardtanh,
    "hardsigmoid": memkern.functional.hardsigmoid,
    "softplus": lambda x: memkern.functional.softplus(x, 1.0, 0.5),
    "gelu": lambda x: memkern.functional.gelu(x, keep="output"),
}


@pytest.fixture
def new_tables() -> Iterator[None]:
    _activation.cache_clear()
    yield
    torch.set_default_dtype(torch.float32)
    _activation.cache_clear()


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", MADE)
def test_torchs_default_dtype_changes_no_derivative(new_tables: None, default: torch.dtype, name: str) -> None:
    x = kinks(torch.float32)
    for backend in ("reference", *fast_here()[-1:]):
        torch.set_default_dtype(torch.float32)
        with on(backend):
            (expected,) = torch.autograd.grad(MADE[name](x).sum(), x)
            _activation.cache_clear()
            torch.set_default_dtype(default)
            (dx,) = torch.autograd.grad(MADE[name](x).sum(), x)
        assert torch.equal(dx, expected), backend


@pytest.mark.parametrize("name", MADE)
def test_tables_are_made_under_modes_of_torch(new_tables: None, name: str) -> None:
    """In a model that is built on the meta device, or in fake tensors."""
    for mode in (torch.device("meta"), FakeTensorMode()):
        _activation.cache_clear()
        with mode:
            x = torch.ones(3, requires_grad=True)
            MADE[name](x).sum().backward()
        assert x.grad is not None
