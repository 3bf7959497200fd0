"""The gradient of a composite activation by autograd's formulas, without its graph: the same bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkern.functions.derivative import Chain
from memkern.functions.saves_input import Recompute
from memkern.swap import recompute
from memkern.swap.recompute import chain_of
from tests.support import gpt2


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class FastGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


class ErfGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul(x.sigmoid())


FORMS = {
    "gelu_new": gpt2.NewGELUActivation,
    "quick_gelu": QuickGELU,
    "gelu_fast": FastGELU,
    "gelu_python": ErfGELU,
    "swish": Swish,
}
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e30, -1e30, 1e-40, -1e-40, 6e4, -6e4, 20.0, -20.0]


def inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    x = torch.randn(24, 40, generator=torch.Generator().manual_seed(0)) * 4
    x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    x = x.to(dtype)
    return {
        "contiguous": x,
        "transposed": x.t(),
        "gaps": x[:, ::2],
        "0-dim": x[1, 1],
        "expanded": x[0].expand(3, 40),
        "empty": x[:0],
    }


def bits(x: Tensor) -> Tensor:
    """As whole numbers, so that NaN and the sign of 0 count."""
    return x.detach().contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.itemsize])


def check_bits(activation: nn.Module, x: Tensor, autocast: torch.dtype | None = None) -> None:
    chain = chain_of(activation)
    assert chain is not None
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        expected, actual = activation(x), Recompute.apply(x, activation.forward, chain)
    assert actual.grad_fn.gradient is not None
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(expected.dtype)
    for given in (grad, torch.ones_like(grad[..., :1]).expand(grad.shape) if grad.dim() else grad):
        (theirs,), (ours,) = (torch.autograd.grad(y, x, given, retain_graph=True) for y in (expected, actual))
        assert torch.equal(bits(ours), bits(theirs))
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("form", FORMS)
def test_bits_of_autograd(form: str, dtype: torch.dtype) -> None:
    for x in inputs(dtype).values():
        check_bits(FORMS[form](), x)


@pytest.fixture
def pow_in_fp32() -> Iterator[None]:
    """What CUDA's autocast does with ``pow``, on the CPU."""

    def power(x: Tensor, exponent: Any) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return torch.pow(x.float() if x.dtype in (torch.bfloat16, torch.float16) else x, exponent)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("pow.Tensor_Scalar", power, "AutocastCPU")
        recompute._known.clear()  # with the dtypes of the other policy
        yield
    recompute._known.clear()


@pytest.mark.usefixtures("pow_in_fp32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", ["gelu_new", "gelu_fast"])
def test_bits_under_autocast(form: str, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert FORMS[form]()(torch.ones(2, dtype=dtype)).dtype == (torch.float32 if form == "gelu_new" else dtype)
    check_bits(FORMS[form](), inputs(dtype)["contiguous"], torch.bfloat16)


def test_kernels() -> None:
    """No more than autograd has, which runs all eight operations again."""
    activation = gpt2.NewGELUActivation()
    x, counts = torch.randn(8, requires_grad=True), []
    for chain in (None, chain_of(activation)):
        y = Recompute.apply(x, activation.forward, chain)
        with torch.profiler.profile() as profile:
            y.sum().backward()
        counts.append(sum(event.count for event in profile.key_averages() if event.key.startswith("aten::")))
    assert counts[1] < counts[0]


def no_chain(forward: Any) -> Chain | None:
    return chain_of(type("Activation", (nn.Module,), {"forward": forward})())


def helper(x: Tensor) -> Tensor:
    return x * 0.5


def in_no_grad(self: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = x.sigmoid()
    return x * gate


@torch.autocast("cpu", enabled=False)
def with_autocast(self: nn.Module, x: Tensor) -> Tensor:
    return x * 0.5


NOT_KNOWN = {
    "a function of its own": lambda self, x: helper(x) * 2,
    "another operation": lambda self, x: x * torch.erfc(x),
    "part of it without a gradient": in_no_grad,
    "autocast off": with_autocast,
    "detach": lambda self, x: x * x.detach(),
    "in place": lambda self, x: (x * 2).add_(1),
    "data": lambda self, x: x * x.data,
    "an attribute": lambda self, x: x * self.training,
    "a branch": lambda self, x: x * 2 if x.sum() > 0 else x,
    "a number to the power": lambda self, x: 2**x,
    "from a number": lambda self, x: 1 - x,
    "options": lambda self, x: torch.add(x, x, alpha=2),
    "not a number": lambda self, x: x * math.nan,
}


@pytest.mark.parametrize("case", NOT_KNOWN)
def test_what_is_not_known_is_left_to_autograd(case: str) -> None:
    assert no_chain(NOT_KNOWN[case]) is None


def test_a_forward_replaced_later() -> None:
    cls = type("Activation", (nn.Module,), {"forward": QuickGELU.forward})
    activation = cls()
    assert chain_of(activation) is not None
    cls.forward = lambda self, x: x * torch.sigmoid(2 * x)  # type: ignore[attr-defined]
    assert chain_of(activation) is None
    assert no_chain(cls.forward) is not None


def test_an_attribute_set_later() -> None:
    activations = pytest.importorskip("transformers.activations", reason="transformers is not installed")
    one, other = (activations.AccurateGELUActivation() for _ in range(2))
    python = activations.GELUActivation(use_gelu_python=True)
    check_bits(one, inputs(torch.float32)["contiguous"])
    check_bits(python, inputs(torch.float32)["contiguous"])
    other.precomputed_constant = 0.8
    assert chain_of(one) is not None
    assert chain_of(other) is None
    python.act = nn.functional.gelu
    assert chain_of(python) is None
    recompute._known.pop(activations.AccurateGELUActivation)
    check_bits(other, inputs(torch.float32)["contiguous"])  # recorded with its own
    recompute._known.pop(activations.AccurateGELUActivation)


def test_a_second_derivative_is_autograds() -> None:
    x = torch.randn(5, dtype=torch.double, requires_grad=True)
    for make in FORMS.values():
        activation = make()
        function = lambda x, a=activation: Recompute.apply(x, a.forward, chain_of(a))  # noqa: E731
        torch.autograd.gradcheck(function, (x,))
        torch.autograd.gradgradcheck(function, (x,))


def test_autocast_around_the_backward_pass() -> None:
    activation, x = gpt2.NewGELUActivation(), torch.randn(4, 4, requires_grad=True)
    y = Recompute.apply(x, activation.forward, chain_of(activation))
    with torch.autocast("cpu", torch.bfloat16):
        (actual,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(activation(x).sum(), x)
    assert torch.equal(actual, expected)
