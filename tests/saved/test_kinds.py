"""Tensor subclasses, functions without a module, and forward-mode derivatives: memkern.quantize_saved does as torch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import memkern

from .helpers import WIDTH

Case = Callable[[contextlib.AbstractContextManager], Sequence[Tensor]]
CASES: list[Case] = []


def case(function: Case) -> Case:
    CASES.append(function)
    return function


def _layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH)


@case
def sparse_csr(context: contextlib.AbstractContextManager) -> Sequence[Tensor]:
    layer, x = _layer(), torch.randn(WIDTH, WIDTH)
    matrix = (torch.rand(WIDTH, WIDTH) > 0.8).float().to_sparse_csr()
    with context:
        h = layer(x)
        loss = (matrix @ h).square().sum() + (h * h).sum()
    return torch.autograd.grad(loss, list(layer.parameters()))


@case
def sparse_csr_with_a_gradient(context: contextlib.AbstractContextManager) -> Sequence[Tensor]:
    layer, x = _layer(), torch.randn(WIDTH, WIDTH)
    matrix = (torch.rand(WIDTH, WIDTH) > 0.8).float().to_sparse_csr().requires_grad_()
    with context:
        loss = torch.sparse.mm(matrix, layer(x)).sum()
    gradients = torch.autograd.grad(loss, [matrix, *layer.parameters()])
    return gradients[0].to_dense(), *gradients[1:]


@case
def jagged(context: contextlib.AbstractContextManager) -> Sequence[Tensor]:
    layer, norm = _layer(), nn.LayerNorm(WIDTH)
    x = torch.nested.nested_tensor([torch.randn(n, WIDTH) for n in (10, 30, 50)], layout=torch.jagged)
    with context:
        loss = (F.silu(norm(layer(x))) * layer(x)).values().square().sum()
    return torch.autograd.grad(loss, list(layer.parameters()))


@case
def forward_mode(context: contextlib.AbstractContextManager) -> Sequence[Tensor]:
    layer, x = _layer(), torch.randn(WIDTH, WIDTH)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with context:
            y = forward_ad.unpack_dual(F.silu(layer(dual)))
    return y.primal, y.tangent, *torch.autograd.grad(y.tangent.square().sum(), list(layer.parameters())[:1])


@case
def forward_over_reverse(context: contextlib.AbstractContextManager) -> Sequence[Tensor]:
    layer, x = _layer(), torch.randn(WIDTH, WIDTH)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x)).requires_grad_()
        with context:
            loss = (layer(dual).tanh() * layer(dual)).square().sum()
        return forward_ad.unpack_dual(torch.autograd.grad(loss, dual)[0])


@case
def vmap(context: contextlib.AbstractContextManager) -> Sequence[Tensor]:
    layer, x = _layer(), torch.randn(8, 32, WIDTH)
    with context:
        loss = torch.vmap(lambda row: F.silu(layer(F.dropout(row, 0.0))).sum())(x).sum()
    return torch.autograd.grad(loss, list(layer.parameters()))


@case
def hooks_without_a_module(context: contextlib.AbstractContextManager) -> Sequence[Tensor]:
    layer, x = _layer(), torch.randn(WIDTH, WIDTH)
    with saved_tensors_hooks(Tensor.clone, functools.partial(torch.clone)), context:
        loss = F.silu(layer(x)).sum()
    return torch.autograd.grad(loss, list(layer.parameters()))


@case
def sum_over_everything(context: contextlib.AbstractContextManager) -> Sequence[Tensor]:
    x = torch.randn(4, 1, requires_grad=True)
    with context:
        total = (x * 1).sum(dim=None, keepdim=True)
        loss = (total * total.cos()).sum()
    return torch.autograd.grad(loss, x)


def _through_float8(dtype: torch.dtype, first: bool, context: contextlib.AbstractContextManager) -> Any:
    layer = _layer()
    with context:
        h = layer(torch.randn(WIDTH, WIDTH))
        if first:
            loss = layer(h.to(dtype).float()).square().sum() + layer(h).square().sum()
        else:
            loss = layer(h).square().sum() + layer(h.t().to(dtype).float()).square().sum()
        loss = loss + (h.to(dtype).to(torch.bfloat16) * h).float().sum()
    return torch.autograd.grad(loss, list(layer.parameters()))


for _dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz):
    for _first in (True, False):
        _case = functools.partial(_through_float8, _dtype, _first)
        _case.__name__ = f"{_dtype}, {'first' if _first else 'second'}"  # type: ignore[attr-defined]
        case(_case)


@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_the_gradients_are_torch_s(function: Case, bits: Any) -> None:
    torch.manual_seed(1)
    expected = function(contextlib.nullcontext())
    torch.manual_seed(1)
    actual = function(memkern.quantize_saved(bits))
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).norm() <= (1e-6 if bits == "exact" else 0.03) * b.norm()


def _bounded_norm(context: contextlib.AbstractContextManager) -> Sequence[Tensor]:
    layer, rows = _layer(), nn.Embedding(50, WIDTH, max_norm=1.0)
    with context:
        loss = layer(rows(torch.arange(40))).square().sum()
        loss = loss + layer(rows(torch.arange(20, 50))).cos().sum()
    return torch.autograd.grad(loss, [rows.weight, *layer.parameters()])


def _changed(context: contextlib.AbstractContextManager) -> Sequence[Tensor]:
    layer, rows = _layer(), nn.Embedding(50, WIDTH)
    with context:
        loss = layer(rows(torch.arange(40))).square().sum()
    with torch.no_grad():
        rows.weight.mul_(3)
    return torch.autograd.grad(loss, [rows.weight, *layer.parameters()])


@pytest.mark.parametrize("function", [_bounded_norm, _changed])
def test_an_embedding_s_table_may_change_before_the_backward_pass(function: Case) -> None:
    """Torch saves its rows, not the table. In 8 bits they are in codes; exactly they would cost what torch saves."""
    torch.manual_seed(1)
    expected = function(contextlib.nullcontext())
    torch.manual_seed(1)
    actual = function(memkern.quantize_saved(8))
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).norm() <= 0.03 * b.norm()
    with pytest.raises(RuntimeError, match="a parameter or another leaf of shape"):
        function(memkern.quantize_saved("exact"))
