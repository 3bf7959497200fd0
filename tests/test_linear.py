"""Randomized linear layers: exact where they promise it, unbiased with the known variance where they do not."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import assert_same, name_of, over_dtypes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memkern import memory, projection
from memkern.functional import randomized_linear
from memkern.nn import RandomizedLinear

PROJECTIONS = [*projection.PROJECTIONS]
over_projections = pytest.mark.parametrize("name", PROJECTIONS)
CPU = torch.device("cpu")


def inputs(shape: tuple[int, ...], out: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, weight, bias as leaves, and a gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    shapes = [shape, (out, shape[-1]), (out,), (*shape[:-1], out)]
    tensors = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
    return [*(t.requires_grad_() for t in tensors[:3]), tensors[3]]


def matrix(name: str, n: int, k: int, seed: Tensor) -> Tensor:
    return projection.project(torch.eye(n, dtype=torch.float64), k, name, seed)


def seeds() -> Any:
    generator = torch.Generator().manual_seed(2)
    while True:
        yield projection.draw_seed(CPU, generator)


# What is exact


@over_projections
@over_dtypes
@pytest.mark.parametrize("shape", [(200, 24), (3, 67, 24), (2, 3, 5, 24)], ids=str)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
def test_all_but_the_weight_gradient_is_torch_s(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], with_bias: bool
) -> None:
    x, weight, bias, grad = inputs(shape, 17, dtype)
    leaves = [x, weight, *([bias] if with_bias else [])]
    y = randomized_linear(*leaves, projection=name, min_tokens=0)
    plain = F.linear(*leaves)
    assert_same(y, plain)
    ours, theirs = (torch.autograd.grad(out, leaves, grad) for out in (y, plain))
    assert_same([ours[0], *ours[2:]], [theirs[0], *theirs[2:]])
    assert ours[1].dtype == dtype
    assert not torch.equal(ours[1], theirs[1])


@over_projections
def test_inputs_of_any_strides(name: str) -> None:
    x, weight, bias, grad = inputs((6, 40, 24), 17)
    flipped = x.detach().permute(2, 1, 0).contiguous().permute(2, 1, 0).requires_grad_()
    results = []
    for given in (x, flipped):
        torch.manual_seed(0)
        y = randomized_linear(given, weight, bias, projection=name)
        wide = grad.repeat(1, 1, 2)[..., ::2].copy_(grad)  # a gradient that is not dense
        results.append([y.detach(), *torch.autograd.grad(y, [given, weight, bias], wide)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


# What is random


def test_rows_are_a_sample_without_replacement() -> None:
    counts = torch.zeros(20)
    for seed, _ in zip(seeds(), range(2000), strict=False):
        s = matrix("rows", 20, 6, seed)
        assert_same(s @ s.T, torch.eye(6, dtype=torch.float64))
        counts += s.sum(0)
    expected = 2000 * 6 / 20
    assert (counts - expected).abs().max() < 5 * math.sqrt(expected)


@pytest.mark.parametrize("n", [1, 2, 5, 24, 97])
def test_dct_is_the_transform_with_signs(n: int) -> None:
    seed = next(seeds())
    s = matrix("dct", n, n, seed)
    f, i = torch.meshgrid(*2 * [torch.arange(n, dtype=torch.float64)], indexing="ij")
    cosines = torch.cos(math.pi * f * (2 * i + 1) / (2 * n)) * math.sqrt(2 / n)
    cosines[0] /= math.sqrt(2)
    order = (s.abs() @ cosines.abs().T).argmax(1) if n > 2 else None  # which frequency a row is
    torch.testing.assert_close(s @ s.T, torch.eye(n, dtype=torch.float64), atol=1e-12, rtol=0)
    if order is None or len(order.unique()) < n:
        order = projection._sample(seed, 0, n, n)
    torch.testing.assert_close(s.abs(), cosines[order].abs(), atol=1e-12, rtol=0)
    signs = (s * cosines[order]).sum(0).sign()
    torch.testing.assert_close(s, cosines[order] * signs, atol=1e-12, rtol=0)


def test_dense_entries_are_signs_and_normals() -> None:
    signs = matrix("rademacher", 300, 200, next(seeds())) * math.sqrt(300)
    torch.testing.assert_close(signs.abs(), torch.ones_like(signs))
    normals = matrix("gaussian", 300, 200, next(seeds())) * math.sqrt(300)
    for entries in (signs, normals):
        count = math.sqrt(entries.numel())
        assert abs(entries.mean()) < 5 / count
        assert abs(entries.square().mean() - 1) < 5 * math.sqrt(2) / count
        for a, b in ((entries[1:], entries[:-1]), (entries[:, 1:], entries[:, :-1])):
            assert abs((a * b).mean()) < 5 / count
    levels = torch.tensor([-2.0, -1, -0.5, 0, 0.5, 1, 2], dtype=torch.float64)
    below = (normals.unsqueeze(-1) < levels).double().mean((0, 1))
    assert (below - torch.special.ndtr(levels)).abs().max() < 2.5 / math.sqrt(normals.numel())


@over_projections
def test_chunks_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, seed = torch.randn(333, 50, dtype=torch.float64), next(seeds())
    whole = projection.project(x, 70, name, seed)
    monkeypatch.setattr(projection, "CHUNK", 3000)
    torch.testing.assert_close(projection.project(x, 70, name, seed), whole, rtol=1e-12, atol=1e-12)


def test_another_seed_is_another_projection() -> None:
    draw = seeds()
    a, b = next(draw), next(draw)
    for name in PROJECTIONS:
        first = matrix(name, 50, 10, a)
        assert_same(matrix(name, 50, 10, a), first)
        assert not torch.equal(matrix(name, 50, 10, b), first)
        for word in (0, 1):  # each word matters
            other = a.clone()
            other[word] += 1
            assert not torch.equal(matrix(name, 50, 10, other), first)


def variance(name: str, x: Tensor, y: Tensor, k: int) -> float:
    """FACTS' formulas: the sum over the weight gradient's elements; for dct derived for random signs."""
    n = len(x)
    product = (y.T @ x).square().sum()
    norms = x.square().sum(1), y.square().sum(1)
    total = norms[0].sum() * norms[1].sum()
    d = norms[0] @ norms[1]
    if name == "dct":
        f, i = torch.meshgrid(*2 * [torch.arange(n, dtype=torch.float64)], indexing="ij")
        c2 = (torch.cos(math.pi * f * (2 * i + 1) / (2 * n)) * math.sqrt(2 / n)).square()
        c2[0] /= 2
        pairs = c2.T @ c2  # sum over frequencies of c_fi^2 c_fj^2
        d = (pairs * torch.outer(*norms)).sum() + 2 * (pairs * (x @ x.T) * (y @ y.T)).sum()
        d = d - 2 * (c2.square().sum(0) * norms[0] * norms[1]).sum()
    if name in ("rows", "dct"):
        return float((n * d - product) / k * (n - k) / (n - 1))
    return float((total + product) / k - (2 * d / k if name == "rademacher" else 0))


RUNS = 2000


@over_projections
def test_weight_gradient_is_unbiased_with_the_known_variance(name: str) -> None:
    n, k = 30, 6
    generator = torch.Generator().manual_seed(3)
    random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    # Tokens of many norms, and x and y of one direction in common, so that no term of the formula is small.
    x = random(n, 4) * random(n, 1).exp() + 1
    y = random(n, 3) * random(n, 1).exp() - 1
    weight = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    exact = y.T @ x
    estimates = []
    for _ in range(RUNS):
        out = randomized_linear(x, weight, keep=k / n, projection=name, generator=generator, min_tokens=0)
        estimates += torch.autograd.grad(out, weight, y)
    errors = torch.stack(estimates) - exact
    expected = variance(name, x, y, k)
    assert errors.mean(0).square().sum() < 3 * expected / RUNS
    squares = errors.square().sum((1, 2))
    spread = float(squares.std()) / math.sqrt(RUNS)
    assert abs(float(squares.mean()) - expected) < 4 * spread
    assert 4 * spread < 0.2 * expected  # the comparison can fail


def test_rows_without_replacement_have_less_variance_than_with() -> None:
    x, y = torch.randn(30, 4, dtype=torch.float64), torch.randn(30, 3, dtype=torch.float64)
    product = (y.T @ x).square().sum()
    d = x.square().sum(1) @ y.square().sum(1)
    assert variance("rows", x, y, 6) == pytest.approx(float((30 * d - product) / 6) * 24 / 29)


# What is kept


@over_projections
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_kept_bytes(name: str, dtype: torch.dtype) -> None:
    layer = RandomizedLinear(64, 96, keep=0.25, projection=name, dtype=dtype)
    x = torch.randn(4, 100, 64, dtype=dtype, requires_grad=True)
    assert memory.saved_bytes(lambda: layer(x)) == 100 * 64 * dtype.itemsize + 16


def test_the_input_is_free_after_the_forward_pass() -> None:
    layer = RandomizedLinear(64, 64)
    norm = nn.LayerNorm(64, elementwise_affine=False)
    x = torch.randn(200, 64, requires_grad=True)
    plain = memory.saved_bytes(lambda: layer(norm(x)), x)
    assert plain == 40 * 64 * 4 + 16 + 2 * 200 * 4  # and mean and deviation


@pytest.mark.parametrize("needs", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)], ids=str)
def test_only_what_is_needed_is_kept_and_computed(needs: tuple[int, int, int]) -> None:
    tensors = inputs((200, 24), 16)
    x, weight, bias = (t.detach().requires_grad_(bool(n)) for t, n in zip(tensors, needs, strict=False))
    leaves = [t for t in (x, weight, bias) if t.requires_grad]
    kept = (needs[0] and 4 * 24 * 16) + (needs[1] and 4 * 40 * 24 + 16)
    run = lambda: randomized_linear(x, weight, bias)  # noqa: E731
    assert memory.saved_bytes(run) == kept
    if leaves:
        grads = torch.autograd.grad(run(), leaves, tensors[3])
        expected = torch.autograd.grad(F.linear(x, weight, bias), leaves, tensors[3])
        for leaf, a, b in zip(leaves, grads, expected, strict=True):
            assert a.shape == leaf.shape
            assert torch.equal(a, b) == (leaf is not weight)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_or_drawn_without_gradients(mode: Any) -> None:
    layer, x = RandomizedLinear(64, 64), torch.randn(200, 64)
    state = torch.get_rng_state()
    with mode():
        assert memory.saved_bytes(lambda: layer(x)) == 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "options",
    [{"min_tokens": 201}, {"keep": 1.0}, {"keep": 0.999}],
    ids=["fewer tokens than min_tokens", "all are kept", "all are kept, rounded"],
)
def test_where_the_layer_is_plain(options: dict[str, Any]) -> None:
    x, weight, bias, grad = inputs((2, 100, 24), 16)
    run = lambda: randomized_linear(x, weight, bias, **options)  # noqa: E731
    assert_same(
        torch.autograd.grad(run(), [x, weight, bias], grad),
        torch.autograd.grad(F.linear(x, weight, bias), [x, weight, bias], grad),
    )
    assert memory.saved_bytes(run, x, weight) == 0
    options = {"min_tokens": 200}
    assert memory.saved_bytes(run, x, weight) > 0


@pytest.mark.parametrize("shape", [(0, 24), (24,), (3, 0, 24)], ids=str)
def test_no_tokens_and_one_token(shape: tuple[int, ...]) -> None:
    x, weight, bias, grad = inputs(shape, 16)
    out = randomized_linear(x, weight, bias, min_tokens=0)
    expected = F.linear(x, weight, bias)
    assert_same(out, expected)
    assert_same(*(torch.autograd.grad(y, [x, weight, bias], grad) for y in (out, expected)))


@over_projections
def test_meta_tensors_have_shapes(name: str) -> None:
    layer = RandomizedLinear(15, 20, projection=name, device="meta")
    y = layer(torch.empty(200, 15, device="meta"))
    assert y.shape == (200, 20)
    y.sum().backward()
    assert layer.weight.grad.shape == (20, 15)


# One seed from forward to backward


def gram(layer: nn.Module, run: Any = lambda layer, x: layer(x)) -> Tensor:
    """N / k S^T S, read off a square layer: its input is the identity, and so is the gradient of its output."""
    n = layer.weight.shape[0]
    layer.zero_grad()
    run(layer, torch.eye(n, requires_grad=True)).backward(torch.eye(n))
    return layer.weight.grad.clone()


def assert_gram(s: Tensor, k: int) -> None:
    """Symmetric, of rank k, trace N: only one S on both sides gives that."""
    n = len(s)
    torch.testing.assert_close(s, s.T, rtol=1e-4, atol=1e-5)
    assert torch.linalg.matrix_rank(s, rtol=1e-4) == k
    assert abs(float(s.trace()) / n - 1) < 0.5


def checkpointed(**options: Any) -> Any:
    return lambda layer, x: checkpoint(layer, x, use_reentrant=False, **options)


@over_projections
@pytest.mark.parametrize("given", [True, False], ids=["generator", "global"])
@pytest.mark.parametrize("preserve", [True, False], ids=["preserved", "not preserved"])
def test_checkpointing(name: str, given: bool, preserve: bool) -> None:
    generator = torch.Generator().manual_seed(4) if given else None
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
def test_autocast(name: str) -> None:
    layer = RandomizedLinear(150, 150, projection=name)
    plain = nn.Linear(150, 150)
    plain.load_state_dict(layer.state_dict())
    x, grad = torch.randn(2, 300, 150, requires_grad=True), torch.randn(2, 300, 150).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert memory.saved_bytes(lambda: layer(x), x) == 120 * 150 * 2 + 16
        ours, theirs = layer(x), plain(x)
    assert_same(ours, theirs)
    (a,), (b,) = (torch.autograd.grad(y, x, grad, retain_graph=True) for y in (ours, theirs))
    assert_same(a, b)
    ours.backward(grad)
    theirs.backward(grad)
    assert layer.weight.grad.dtype == torch.float32
    error = (layer.weight.grad - plain.weight.grad).square().sum()
    y = grad.float().flatten(0, 1)
    assert 0.5 < error / variance(name, x.detach().flatten(0, 1).double(), y.double(), 120) < 2

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
        return out.float()

    s = gram(layer, run)
    torch.testing.assert_close(s, s.T, rtol=0.02, atol=0.02)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@over_projections
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
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
def test_compile_with_a_generator_and_under_autocast() -> None:
    layer = RandomizedLinear(150, 150, generator=torch.Generator())
    compiled = torch.compile(layer, backend="aot_eager")  # the draw breaks the graph: no fullgraph
    assert_gram(gram(layer, lambda _, x: compiled(x)), 30)
    layer.generator = None
    autocast = torch.compile(
        torch.autocast("cpu", torch.bfloat16)(layer), fullgraph=True, backend="aot_eager"
    )
    s = gram(layer, lambda _, x: autocast(x).float())
    torch.testing.assert_close(s, s.T, rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("fresh_compiler")
def test_compile_around_a_checkpoint() -> None:
    layer = RandomizedLinear(150, 150)
    compiled = torch.compile(checkpointed(), fullgraph=True, backend="aot_eager")
    assert_gram(gram(layer, compiled), 30)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_inductor_keeps_the_projection_and_not_the_input() -> None:
    layer = RandomizedLinear(150, 150)
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(400, 150, requires_grad=True)
    assert memory.saved_bytes(lambda: compiled(x * 1)) <= 80 * 150 * 4 + 64
    assert_gram(gram(layer, lambda _, x: compiled(x)), 30)


def test_generators() -> None:
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


def test_a_graph_that_is_used_twice() -> None:
    x, weight, bias, grad = inputs((200, 24), 16)
    y = randomized_linear(x, weight, bias)
    first, again = (torch.autograd.grad(y, [x, weight, bias], grad, retain_graph=True) for _ in range(2))
    assert_same(first, again)


@pytest.mark.parametrize("of", ["x", "weight", "bias"])
def test_double_backward_raises(of: str) -> None:
    tensors = dict(zip(("x", "weight", "bias"), inputs((200, 24), 16), strict=False))
    y = randomized_linear(**tensors).square().sum()
    (grad,) = torch.autograd.grad(y, tensors[of], create_graph=True)
    assert grad.requires_grad
    with pytest.raises(RuntimeError, match=r"randomized_linear keeps .* no second derivative"):
        grad.sum().backward()


def test_changing_the_input_afterwards_is_harmless_and_the_weight_is_noticed() -> None:
    x, weight, bias, grad = inputs((200, 24), 16)
    kept = x.detach().clone().requires_grad_()
    results = []
    for changed in (False, True):
        torch.manual_seed(0)
        given = kept.clone()
        y = randomized_linear(given, weight, bias)
        if changed:
            given.zero_()
        results.append(torch.autograd.grad(y, weight, grad)[0])
    assert_same(*results)
    y = randomized_linear(x, weight, bias)
    with torch.no_grad():
        weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad)


# The module


def test_module_is_a_linear_with_the_same_state() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(24, 16)
    torch.manual_seed(0)
    layer = RandomizedLinear(24, 16, keep=0.5, projection="dct", min_tokens=64)
    assert_same(layer.state_dict(), plain.state_dict())
    assert "keep=0.5, projection='dct'" in repr(layer)
    twin = copy.deepcopy(layer)
    assert (twin.keep, twin.projection, twin.min_tokens) == (0.5, "dct", 64)
    assert RandomizedLinear(24, 16, bias=False).bias is None


def test_training_follows_the_plain_layer() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(512, 32, generator=generator)
    target = torch.tanh(x @ torch.randn(32, 8, generator=generator) / 6)
    losses = {}
    for keep in (1.0, 0.2):
        torch.manual_seed(6)
        layers = [RandomizedLinear(32, 64, keep=keep), nn.Tanh(), RandomizedLinear(64, 8, keep=keep)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(150):
            loss = F.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[keep] = loss.item()
    assert losses[1.0] < 0.1 * target.var()
    assert losses[0.2] < 2 * losses[1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0.0}, "keep must be a share of the tokens, above 0 and at most 1, got 0.0"),
        ({"keep": 1.5}, "keep must be .*, got 1.5"),
        ({"keep": math.nan}, "keep must be .*, got nan"),
        ({"keep": True}, "keep must be .*, got True"),
        (
            {"projection": "fft"},
            "projection must be one of 'rows', 'dct', 'gaussian', 'rademacher', got 'fft'",
        ),
        ({"min_tokens": -1}, "min_tokens must be a whole number, 0 or more, got -1"),
        ({"min_tokens": 1.5}, "min_tokens must be a whole number, 0 or more, got 1.5"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    x, weight, _, _ = inputs((4, 24), 16)
    with pytest.raises(ValueError, match=message):
        randomized_linear(x, weight, **options)
    with pytest.raises(ValueError, match=message):
        RandomizedLinear(24, 16, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@over_projections
def test_cuda_makes_the_same_projection(name: str) -> None:
    seed = next(seeds())
    x = torch.eye(150)
    there = projection.project(x.cuda(), 30, name, seed.cuda())
    torch.testing.assert_close(there.cpu(), projection.project(x, 30, name, seed))
    layer = RandomizedLinear(150, 150, projection=name, generator=torch.Generator()).cuda()
    layer(torch.eye(150, device="cuda", requires_grad=True)).backward(torch.eye(150, device="cuda"))
    assert_gram(layer.weight.grad.cpu(), 30)
