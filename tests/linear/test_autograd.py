"""The forward and the backward pass of a randomized linear layer use one seed, also under autocast, checkpoints and
torch.compile.

Layers have 150 features; by default 30 of 150 tokens are kept, a share of 0.2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memkern import memory
from memkern.functional import randomized_linear
from memkern.nn import RandomizedLinear
from tests.support.helpers import assert_same, first_quick
from tests.support.linear_helpers import assert_gram, checkpointed, gram, inputs, over_projections, variance


@pytest.mark.pairwise
@over_projections
@pytest.mark.parametrize("own_generator", [True, False], ids=["generator", "global"])
@pytest.mark.parametrize("preserve", [True, False], ids=["preserved", "not preserved"])
def test_a_recomputation_uses_the_seed_of_its_own_backward_pass(name: str, own_generator: bool, preserve: bool) -> None:
    generator = torch.Generator().manual_seed(4) if own_generator else None
    layer = RandomizedLinear(150, 150, projection=name, generator=generator)
    assert_gram(gram(layer, checkpointed(preserve_rng_state=preserve)), 30)
    assert_gram(gram(layer), 30)


def test_two_layers_in_one_checkpoint() -> None:
    """Seeds drawn in the recomputation belong to its own projections, whatever was drawn in between."""
    layers = nn.Sequential(*(RandomizedLinear(150, 150, generator=torch.Generator()) for _ in range(2)))
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.eye(150))
            layer.bias.zero_()
    x = torch.eye(150, requires_grad=True)
    out = checkpoint(layers, x, use_reentrant=False, preserve_rng_state=False)
    torch.rand(5)
    out.backward(torch.eye(150))
    for layer in layers:
        assert_gram(layer.weight.grad, 30)


@over_projections
def test_autocast_computes_as_torchs_layer_and_saves_half_precision(name: str) -> None:
    layer = RandomizedLinear(150, 150, projection=name)
    plain = nn.Linear(150, 150)
    plain.load_state_dict(layer.state_dict())
    x, grad = torch.randn(2, 300, 150, requires_grad=True), torch.randn(2, 300, 150).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert memory.saved_bytes(lambda: layer(x), x) == 120 * 150 * 2 + 16  # 120 of 600 tokens, and the seed
        ours, theirs = layer(x), plain(x)
    assert_same(ours, theirs)
    assert_same(*(torch.autograd.grad(y, x, grad, retain_graph=True) for y in (ours, theirs)))
    ours.backward(grad)
    theirs.backward(grad)
    assert layer.weight.grad.dtype == torch.float32
    error = (layer.weight.grad - plain.weight.grad).square().sum()
    y = grad.float().flatten(0, 1)
    # One draw of the weight gradient's squared error is near its mean, the variance.
    assert 0.5 < error / variance(name, x.detach().flatten(0, 1).double(), y.double(), 120) < 2

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
        return out.float()

    s = gram(layer, run)
    torch.testing.assert_close(s, s.T, rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("name", "bias"), first_quick([("dct", True), ("rows", False)]))
def test_compile_without_a_graph_break(name: str, bias: bool) -> None:
    layer = RandomizedLinear(150, 150, bias, projection=name)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_gram(gram(layer, lambda _, x: compiled(x)), 30)
    x = torch.randn(150, 150, requires_grad=True)
    assert memory.saved_bytes(lambda: compiled(x)) == 30 * 150 * 4 + 16
    assert_same(compiled(x), layer(x))
    a, b = (gram(layer, lambda _, x: compiled(x)) for _ in range(2))
    assert not torch.equal(a, b)  # the seed is no constant of the graph


@pytest.mark.usefixtures("fresh_compiler")
def test_compile_with_a_generator_and_under_autocast_uses_one_seed() -> None:
    layer = RandomizedLinear(150, 150, generator=torch.Generator())
    compiled = torch.compile(layer, backend="aot_eager")  # the draw breaks the graph: no fullgraph
    assert_gram(gram(layer, lambda _, x: compiled(x)), 30)
    layer.generator = None
    autocast = torch.compile(torch.autocast("cpu", torch.bfloat16)(layer), fullgraph=True, backend="aot_eager")
    s = gram(layer, lambda _, x: autocast(x).float())
    torch.testing.assert_close(s, s.T, rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("fresh_compiler")
def test_compile_around_a_checkpoint_uses_one_seed() -> None:
    layer = RandomizedLinear(150, 150)
    compiled = torch.compile(checkpointed(), fullgraph=True, backend="aot_eager")
    assert_gram(gram(layer, compiled), 30)


@pytest.mark.full
@pytest.mark.usefixtures("fresh_compiler")
def test_inductor_keeps_the_projection_and_not_the_input() -> None:
    layer = RandomizedLinear(150, 150)
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(400, 150, requires_grad=True)
    assert memory.saved_bytes(lambda: compiled(x * 1)) <= 80 * 150 * 4 + 64
    assert_gram(gram(layer, lambda _, x: compiled(x)), 30)


def test_seeds_come_from_the_layers_generator_or_the_global_one() -> None:
    def run(**options: Any) -> Tensor:
        return gram(RandomizedLinear(150, 150, **options))

    a, b = (run(generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert_same(a, b)
    results = []
    for _ in range(2):
        torch.manual_seed(8)
        results.append(run())
    assert_same(*results)
    assert not torch.equal(a, results[0])
    generator = torch.Generator().manual_seed(7)
    layer = RandomizedLinear(150, 150, generator=generator)
    assert_same(gram(layer), a)
    assert not torch.equal(gram(layer), a)  # its own seed per call


def test_a_graph_that_is_used_twice_gives_the_same_gradients() -> None:
    x, weight, bias, grad = inputs((200, 24), 16)
    y = randomized_linear(x, weight, bias)
    first, second = (torch.autograd.grad(y, [x, weight, bias], grad, retain_graph=True) for _ in range(2))
    assert_same(first, second)


@pytest.mark.parametrize("leaf", ["x", "weight", "bias"])
def test_double_backward_raises(leaf: str) -> None:
    tensors = dict(zip(("x", "weight", "bias"), inputs((200, 24), 16), strict=False))
    y = randomized_linear(**tensors).square().sum()
    (grad,) = torch.autograd.grad(y, tensors[leaf], create_graph=True)
    assert grad.requires_grad
    with pytest.raises(RuntimeError, match=r"randomized_linear saves .* no second derivative"):
        grad.sum().backward()


def test_changing_the_input_afterwards_is_harmless_and_the_weight_is_noticed() -> None:
    x, weight, bias, grad = inputs((200, 24), 16)
    results = []
    for changed in (False, True):
        torch.manual_seed(0)
        x_copy = x.clone()
        y = randomized_linear(x_copy, weight, bias)
        if changed:
            x_copy.zero_()
        results.append(torch.autograd.grad(y, weight, grad)[0])
    assert_same(*results)
    y = randomized_linear(x, weight, bias)
    with torch.no_grad():
        weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad)
