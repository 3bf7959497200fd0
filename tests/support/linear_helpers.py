"""For the tests of randomized linear layers: inputs, projections as matrices, variance, a check of the seed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memkern.functions import projection

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
    """The projection of n tokens to k as a matrix of shape (k, n)."""
    return projection.project(torch.eye(n, dtype=torch.float64), k, name, seed)


def seeds() -> Any:
    """An endless iterator of seeds of projections."""
    generator = torch.Generator().manual_seed(2)
    while True:
        yield projection.draw_seed(CPU, generator)


def variance(name: str, x: Tensor, y: Tensor, k: int) -> float:
    """The sum of the variances of the weight gradient's elements, by docs/numerics.md: N tokens are projected to k."""
    n = len(x)
    product = (y.T @ x).square().sum()  # |Y^T X|^2
    norms = x.square().sum(1), y.square().sum(1)  # |x_i|^2 and |y_i|^2 of each token
    d = norms[0] @ norms[1]  # the sum of |x_i|^2 |y_i|^2 over tokens; for dct with the transform's entries
    if name == "dct":
        f, i = torch.meshgrid(*2 * [torch.arange(n, dtype=torch.float64)], indexing="ij")
        squared = (torch.cos(math.pi * f * (2 * i + 1) / (2 * n)) * math.sqrt(2 / n)).square()
        squared[0] /= 2  # squares c_fi^2 of the cosine transform's entries, whose signs are random
        pairs = squared.T @ squared  # sum over frequencies of c_fi^2 c_fj^2
        d = (pairs * torch.outer(*norms)).sum() + 2 * (pairs * (x @ x.T) * (y @ y.T)).sum()
        d = d - 2 * (squared.square().sum(0) * norms[0] * norms[1]).sum()
    return float((n * d - product) / k * (n - k) / (n - 1))


def gram(layer: nn.Module, run: Any = lambda layer, x: layer(x)) -> Tensor:
    """N / k S^T S, the weight gradient of a square layer whose input and output gradient are the identity."""
    n = layer.weight.shape[0]
    layer.zero_grad()
    run(layer, torch.eye(n, requires_grad=True)).backward(torch.eye(n))
    return layer.weight.grad.clone()


def assert_gram(s: Tensor, k: int) -> None:
    """Asserts a symmetric matrix of rank k and a trace of about N: forward and backward pass have used the same S."""
    n = len(s)
    torch.testing.assert_close(s, s.T, rtol=1e-4, atol=1e-5)
    assert torch.linalg.matrix_rank(s, rtol=1e-4) == k
    assert abs(float(s.trace()) / n - 1) < 0.5


def checkpointed(**options: Any) -> Any:
    """A ``run`` of :func:`gram` with a checkpoint around the layer."""
    return lambda layer, x: checkpoint(layer, x, use_reentrant=False, **options)
