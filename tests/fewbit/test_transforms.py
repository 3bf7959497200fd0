"""memkern's functions work in torch.func; second derivatives and forward mode raise and name memkern.restore."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, grad_and_value, jacrev, jvp, vjp, vmap

import memkern
from memkern import functional
from memkern.fewbit.tables import LEVELS
from tests.support.helpers import assert_same

COTANGENT = torch.randn(20, 12)

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "silu, 2 bits": lambda x: functional.silu(x, bits=2),
    "gelu from the output": lambda x: functional.gelu(x, "tanh", keep="output"),
    "softplus": lambda x: functional.softplus(x, 2.0),
    "few_bit": lambda x: functional.few_bit(x, torch.sin, LEVELS["gelu", 2]),
    "swiglu": functional.swiglu,
    "geglu, one argument twice": lambda x: functional.geglu(x, x * 2),
    "in place": lambda x: functional.leaky_relu(x * 2, inplace=True),
}
EXACT = ("swiglu", "geglu, one argument twice")  # their derivatives are not coded
WAY_OUT = r"memkern\.restore\(model\)"
over_functions = pytest.mark.parametrize("name", FUNCTIONS)


def loss_of(name: str) -> Callable[[Tensor], Tensor]:
    return lambda x: (FUNCTIONS[name](x) * torch.arange(1.0, 1 + FUNCTIONS[name](x).shape[-1])).sum()


def gradient(loss: Callable[..., Tensor], x: Tensor) -> Tensor:
    """The gradient by torch.autograd, without torch.func."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    return torch.autograd.grad(loss(x), x)[0]


def compare(name: str, actual: Tensor, expected: Tensor) -> None:
    """Asserts the same bits; for GLUs and derivatives from the output, which several operations compute, closeness."""
    if any(word in name for word in ("glu", "output")):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    else:
        assert_same(actual.contiguous(), expected.contiguous())


SHAPES = {
    "contiguous": lambda: torch.randn(5, 6, 12),
    "transposed": lambda: torch.randn(5, 12, 6).transpose(1, 2),
    "examples innermost": lambda: torch.randn(6, 12, 5).permute(2, 0, 1),
}


@pytest.mark.feature("torch", "`torch.func.grad`, `vjp`, `vmap`, `jacrev` through memkern's functions")
@over_functions
@pytest.mark.parametrize("shape", [s if s == "contiguous" else pytest.param(s, marks=pytest.mark.full) for s in SHAPES])
def test_gradients_of_examples_are_autograds(name: str, shape: str) -> None:
    x, loss = SHAPES[shape](), loss_of(name)
    expected = torch.stack([gradient(loss, example) for example in x])
    compare(name, grad(loss)(x[0]), expected[0])
    compare(name, vmap(grad(loss))(x), expected)
    # Transforms the other way round: one gradient of the sum.
    compare(name, grad(lambda t: vmap(loss)(t).sum())(x), expected)
    compare(name, gradient(lambda t: vmap(loss)(t).sum(), x), expected)
    by_dim = vmap(grad(loss), in_dims=1, out_dims=1)(x.transpose(0, 1))
    compare(name, by_dim.transpose(0, 1), expected)


@over_functions
def test_a_batch_of_no_examples(name: str) -> None:
    assert vmap(grad(loss_of(name)), in_dims=1)(torch.empty(6, 0, 12)).shape == (0, 6, 12)


@over_functions
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_jacobians_are_autograds(name: str, layout: str) -> None:
    x = torch.randn(2, 12) if layout == "contiguous" else torch.randn(12, 2).t()
    fn = FUNCTIONS[name]
    y, back = vjp(fn, x)
    rows = []
    for i in range(y.numel()):
        cotangent = torch.zeros(y.numel()).index_fill_(0, torch.tensor(i), 1.0).view_as(y)
        rows.append(back(cotangent)[0])
        compare(name, rows[-1], gradient(lambda t, c=cotangent: (fn(t) * c).sum(), x))
    vectorized = torch.autograd.functional.jacobian(fn, x, vectorize=True)
    for jacobian in (jacrev(fn)(x), vectorized):
        torch.testing.assert_close(jacobian.reshape(y.numel(), *x.shape), torch.stack(rows), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("batched", ["x", "weight"])
def test_randomized_linear_estimates_the_weights_gradient_of_each_example(batched: str) -> None:
    """Each example has a projection of its own. Outputs and gradients of x are torch's."""
    x, weight = torch.randn(3, 20, 12), torch.randn(3, 24, 12)

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        y = functional.randomized_linear(x, weight, share=0.5, min_tokens=0)
        return (y * COTANGENT[:, :1]).sum()

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        return (F.linear(x, weight) * COTANGENT[:, :1]).sum()

    dims = (0, None) if batched == "x" else (None, 0)
    args = (x, weight[0]) if batched == "x" else (x[0], weight)
    actual = vmap(grad(loss, argnums=(0, 1)), in_dims=dims, randomness="different")(*args)
    expected = vmap(grad(exact, argnums=(0, 1)), in_dims=dims)(*args)
    torch.testing.assert_close(actual[0], expected[0])
    mean = torch.stack(
        [vmap(grad(loss, argnums=1), in_dims=dims, randomness="different")(*args) for _ in range(150)]
    ).mean(0)
    error = (mean - expected[1]).norm() / expected[1].norm()
    assert error < 0.15  # 1 / sqrt(150) of an estimate whose own error is about its size
    assert not torch.equal(actual[1], expected[1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(grad(loss, argnums=1), in_dims=dims)(*args)


def test_linear_cross_entropy_has_torchs_gradient_and_no_second_one() -> None:
    x, weight, target = torch.randn(20, 12), torch.randn(30, 12), torch.randint(30, (20,))

    def loss(x: Tensor) -> Tensor:
        return functional.linear_cross_entropy(x, weight, target, chunk_size=8)

    expected = grad(lambda t: F.cross_entropy(F.linear(t, weight), target))(x)
    torch.testing.assert_close(grad(loss)(x), expected)
    with pytest.raises(RuntimeError, match=f"no second derivative.*{WAY_OUT}"):
        grad(lambda t: grad(loss)(t).sum())(x)


def test_gradients_of_examples_of_a_compressed_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.GELU(), torch.nn.Linear(24, 4))
    memkern.compress(model)
    params = {name: p.detach() for name, p in model.named_parameters()}
    x, y = torch.randn(6, 12), torch.randn(6, 4)

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, params, (x[None],))[0], y)

    grads, losses = vmap(grad_and_value(loss), in_dims=(None, 0, 0))(params, x, y)
    for i in range(len(x)):
        model.zero_grad()
        expected_loss = F.mse_loss(model(x[i : i + 1])[0], y[i])
        expected_loss.backward()
        torch.testing.assert_close(losses[i], expected_loss.detach())
        for name, p in model.named_parameters():
            torch.testing.assert_close(grads[name][i], p.grad)


@pytest.mark.feature("torch", "second derivatives and forward-mode AD raise with the way out")
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in EXACT])
def test_second_derivatives_raise(name: str) -> None:
    x, loss = torch.randn(3, 12), loss_of(name)
    with pytest.raises(RuntimeError, match=f"no second derivative.*{WAY_OUT}"):
        grad(lambda t: grad(loss)(t).sum())(x)
    with pytest.raises(RuntimeError, match=f"no second derivative.*{WAY_OUT}"):
        vmap(grad(lambda t: grad(loss)(t).square().sum()))(x)


@pytest.mark.parametrize("name", EXACT)
def test_exact_functions_have_second_derivatives(name: str) -> None:
    x, loss = torch.randn(3, 12, dtype=torch.float64), FUNCTIONS[name]
    actual = grad(lambda t: grad(lambda s: loss(s).sum())(t).sum())(x)
    x.requires_grad_()
    (first,) = torch.autograd.grad(loss(x).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(actual, expected)


@over_functions
def test_forward_mode_raises(name: str) -> None:
    fn, x = FUNCTIONS[name], torch.randn(3, 12)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone().requires_grad_(), torch.ones(3, 12))
        with pytest.raises(RuntimeError, match=f"forward-mode AD is not possible; .*{WAY_OUT}"):
            fn(dual)
    with pytest.raises(RuntimeError, match=f"forward-mode AD is not possible; .*{WAY_OUT}"):
        jvp(lambda t: grad(loss_of(name))(t), (x,), (torch.ones(3, 12),))


@over_functions
def test_forward_mode_without_gradients_gives_the_tangent(name: str) -> None:
    if name == "in place":
        return
    fn, x = FUNCTIONS[name], torch.randn(3, 12)
    y, tangent = jvp(fn, (x,), (torch.ones(3, 12),))
    eps = 1e-3  # fp32's rounding of fn, over eps, is below the tolerance
    torch.testing.assert_close(tangent, (fn(x + eps) - fn(x - eps)) / (2 * eps), rtol=2e-2, atol=2e-2)
    assert_same(y, fn(x))
