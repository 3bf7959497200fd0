"""The projections of randomized layers are unbiased, have the known variance, and are the same for the same seed."""

from __future__ import annotations

import math

import pytest
import torch

from memkern.functional import randomized_linear
from memkern.functions import projection
from memkern.nn import RandomizedLinear
from tests.support.helpers import assert_same
from tests.support.linear_helpers import PROJECTIONS, assert_gram, matrix, over_projections, seeds, variance


def test_rows_are_a_sample_without_replacement() -> None:
    counts = torch.zeros(20)
    for seed, _ in zip(seeds(), range(2000), strict=False):
        s = matrix("rows", 20, 6, seed)
        assert_same(s @ s.T, torch.eye(6, dtype=torch.float64))
        counts += s.sum(0)
    expected = 2000 * 6 / 20
    assert (counts - expected).abs().max() < 5 * math.sqrt(expected)  # 5 standard deviations, or more


@pytest.mark.parametrize("n", [1, 2, 5, 24, 97])
def test_dct_is_the_transform_with_signs(n: int) -> None:
    seed = next(seeds())
    s = matrix("dct", n, n, seed)
    f, i = torch.meshgrid(*2 * [torch.arange(n, dtype=torch.float64)], indexing="ij")
    cosines = torch.cos(math.pi * f * (2 * i + 1) / (2 * n)) * math.sqrt(2 / n)
    cosines[0] /= math.sqrt(2)
    torch.testing.assert_close(s @ s.T, torch.eye(n, dtype=torch.float64), atol=1e-12, rtol=0)
    order = projection._sample(seed, 0, n, n)  # which frequency a row is
    torch.testing.assert_close(s.abs(), cosines[order].abs(), atol=1e-12, rtol=0)
    signs = (s * cosines[order]).sum(0).sign()
    torch.testing.assert_close(s, cosines[order] * signs, atol=1e-12, rtol=0)


@over_projections
def test_torchs_default_dtype_does_not_change_the_projection(name: str) -> None:
    x, seed = torch.randn(100, 20), next(seeds())
    expected = projection.project(x, 30, name, seed)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert_same(projection.project(x, 30, name, seed), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@over_projections
def test_chunk_size_does_not_change_the_projection(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, seed = torch.randn(333, 50, dtype=torch.float64), next(seeds())
    in_one_chunk = projection.project(x, 70, name, seed)
    monkeypatch.setattr(projection, "CHUNK", 3000)
    torch.testing.assert_close(projection.project(x, 70, name, seed), in_one_chunk, rtol=1e-12, atol=1e-12)


def test_another_seed_is_another_projection() -> None:
    draw = seeds()
    a, b = next(draw), next(draw)
    for name in PROJECTIONS:
        first = matrix(name, 50, 10, a)
        assert_same(matrix(name, 50, 10, a), first)
        assert not torch.equal(matrix(name, 50, 10, b), first)
        for word in (0, 1):  # of the seed
            other_seed = a.clone()
            other_seed[word] += 1
            assert not torch.equal(matrix(name, 50, 10, other_seed), first)


RUNS = 1000  # estimates of a gradient


@pytest.mark.full
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
        out = randomized_linear(x, weight, share=k / n, projection=name, generator=generator, min_tokens=0)
        estimates += torch.autograd.grad(out, weight, y)
    errors = torch.stack(estimates) - exact
    expected = variance(name, x, y, k)
    assert errors.mean(0).square().sum() < 3 * expected / RUNS  # a mean of RUNS has the variance over RUNS
    squares = errors.square().sum((1, 2))
    deviation = float(squares.std()) / math.sqrt(RUNS)  # of their mean
    assert abs(float(squares.mean()) - expected) < 4 * deviation
    assert 4 * deviation < 0.2 * expected  # a variance that is off by a fifth is found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@over_projections
def test_cuda_makes_the_same_projection(name: str) -> None:
    seed = next(seeds())
    x = torch.eye(150)
    on_cuda = projection.project(x.cuda(), 30, name, seed.cuda())
    torch.testing.assert_close(on_cuda.cpu(), projection.project(x, 30, name, seed))
    layer = RandomizedLinear(150, 150, projection=name, generator=torch.Generator()).cuda()
    layer(torch.eye(150, device="cuda", requires_grad=True)).backward(torch.eye(150, device="cuda"))
    assert_gram(layer.weight.grad.cpu(), 30)
