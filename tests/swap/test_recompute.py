"""Recompute activations that save their input and are run again: torch's bits, and nothing else in the way."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

import memkern
from memkern import memory
from memkern.functions.saves_input import Recompute
from memkern.swap.recompute import Recomputed
from tests.support import gpt2

from ..saved.helpers import WIDTH, gradients, same


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS = {"gelu_new": gpt2.NewGELUActivation, "quick_gelu": QuickGELU}
DTYPES = ["fp32", "bf16 autocast", "fp16 autocast", "bf16", "fp16"]


def mlp(activation: Any = gpt2.NewGELUActivation) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), activation(), nn.Linear(2 * WIDTH, WIDTH))


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(4)).to(dtype)


@pytest.mark.full
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("precision", DTYPES)
def test_bits_of_torch(activation: str, precision: str) -> None:
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16 if "fp16" in precision else torch.float32
    pure = torch.float32 if "autocast" in precision else dtype
    model, x = mlp(ACTIVATIONS[activation]).to(pure), batch(pure)

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype, enabled="autocast" in precision):
            return model(x)

    expected, y = gradients(model, forward), forward()
    plain = memory.live_bytes_after(forward, model, x)
    report = memkern.compress(model, saved_bits="exact")
    assert [(swap.was, type(model[1])) for swap in report.swapped] == [(ACTIVATIONS[activation].__name__, Recomputed)]
    assert torch.equal(forward(), y)
    assert same(gradients(model, forward), expected)
    # The activation's input, and the result.
    size = 256 * (3 * WIDTH) * (4 if precision == "fp32" else 2) + (256 * WIDTH * 2 if pure != dtype else 0)
    assert memory.live_bytes_after(forward, model, x) <= min(size, 0.6 * plain)
    assert memkern.restore(model) == 2
    assert type(model[1]) is ACTIVATIONS[activation]


def test_a_block_that_is_open_during_the_backward_pass() -> None:
    """The second run saves what it needs as torch does: no codes in it."""
    model = mlp()
    expected = gradients(model, lambda: model(batch()))
    memkern.compress(model, activations="recompute")
    with memkern.quantize_saved("exact"):
        assert same(gradients(model, lambda: model(batch())), expected)
    coded: list[dict[str, Tensor]] = []
    with memkern.quantize_saved(8):
        coded.append(gradients(model, lambda: model(batch())))
        loss = model(batch()).square().mean()
    model.zero_grad()
    loss.backward()
    assert same({name: p.grad for name, p in model.named_parameters()}, coded[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_of_a_checkpoint(reentrant: bool) -> None:
    model, x = mlp(), batch().requires_grad_()

    def forward() -> Tensor:
        return checkpoint.checkpoint(model, x, use_reentrant=reentrant)

    expected = gradients(model, forward)
    memkern.compress(model, saved_bits="exact")
    assert same(gradients(model, forward), expected)


def test_autocast_in_another_state_during_the_backward_pass() -> None:
    x = batch().requires_grad_()
    activation = gpt2.NewGELUActivation()
    expected = torch.autograd.grad(activation(x).sum(), x)[0]
    product = Recompute.apply(x, lambda x: activation(x) @ torch.ones(WIDTH, WIDTH)).sum() / WIDTH
    with torch.autocast("cpu", torch.bfloat16):
        actual = torch.autograd.grad(product, x)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives(activation: str) -> None:
    x = torch.randn(5, dtype=torch.double, requires_grad=True)
    function: Callable[[Tensor], Tensor] = lambda x: Recompute.apply(x, ACTIVATIONS[activation]())  # noqa: E731
    torch.autograd.gradcheck(function, (x,))
    torch.autograd.gradgradcheck(function, (x,))


def test_copies_pickles_and_later_calls() -> None:
    model = mlp()
    expected = gradients(model, lambda: model(batch()))
    memkern.compress(model, activations="recompute")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other[1]) is Recomputed
        assert same(gradients(other, lambda other=other: other(batch())), expected)
    assert not memkern.compress(model, activations="recompute").swapped
    memkern.compress(model, 3)
    assert type(model[1]) is memkern.nn.GELU
    memkern.compress(model, activations="recompute")
    assert type(model[1]) is Recomputed
    assert memkern.restore(model) == 1
    assert type(model[1]) is gpt2.NewGELUActivation


def test_what_is_one_operation_stays() -> None:
    model = mlp(nn.GELU)
    memkern.compress(model, 3)
    memkern.compress(model, saved_bits=8)
    assert type(model[1]) is nn.GELU


class Swish(nn.Module):
    """As timm writes it."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(x.sigmoid()) if self.inplace else x.mul(x.sigmoid())


@pytest.mark.parametrize("inplace", [True, False])
def test_what_changes_its_input_is_not_run_twice(inplace: bool) -> None:
    model = mlp(lambda: Swish(inplace))
    memkern.compress(model, activations="recompute")
    assert type(model[1]) is (Swish if inplace else Recomputed)


def test_without_gradients_it_is_the_function() -> None:
    model = mlp()
    memkern.compress(model, activations="recompute")
    with torch.no_grad():
        assert model(batch()).grad_fn is None
    assert model[1](batch()).grad_fn is None


@pytest.mark.full
def test_under_torch_compile() -> None:
    torch._dynamo.reset()
    model = mlp()
    expected = gradients(model, lambda: model(batch()))
    memkern.compress(model, activations="recompute")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = gradients(model, lambda: compiled(batch()))
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient)
