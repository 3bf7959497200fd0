"""The autograd functions behind :mod:`memkern.functional`'s activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from ..quant.codec import ACTIVATIONS
from ..quant.layout import is_dense, same_layout
from ..reference.activation import activate
from .levels import Levels, Valley

# What autocast computes in fp32: torch's op sees to that, a fused kernel would not.
_AUTOCAST_TO_FP32 = (ACTIVATIONS["softplus"],)


def encoded(
    x: Tensor, fn: int, a: float, b: float, table: Levels, inplace: bool = False
) -> tuple[Tensor, Tensor, tuple[int, ...] | None]:
    """The activation, its codes and the strides of the tensor whose codes they are; None is contiguous."""
    dense = x.is_contiguous() or is_dense(x.shape, x.stride())
    if inplace:
        codes = _ops.few_bit_encode(x if dense else torch.empty_like(x).copy_(x), table)
        y = activate(x, fn, a, b, inplace=True)
    elif dense and fn not in _AUTOCAST_TO_FP32:
        y, codes = _ops.few_bit_forward(x, fn, a, b, table)
    else:
        y = activate(x, fn, a, b)
        codes = _ops.few_bit_encode(x if dense else torch.empty_like(y, dtype=x.dtype).copy_(x), table)
    return y, codes, _stride_of(y)


def _stride_of(x: Tensor) -> tuple[int, ...] | None:
    return None if x.is_contiguous() else torch.empty_like(x, device="meta").stride()


def laid_out(grad: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """``grad`` with the strides of the tensor that was encoded."""
    if stride is None:
        return grad.contiguous()
    if grad.stride() == stride:
        return grad
    return grad.new_empty_strided(grad.shape, stride).copy_(grad)


class _NoSecondDerivative(torch.autograd.Function):
    """Passes a gradient on, and raises where somebody asks for its derivative.

    torch's once_differentiable lets a wrong result through where the incoming gradient is a constant.
    """

    @staticmethod
    def forward(ctx: Any, grad: Tensor, reason: str) -> Tensor:
        ctx.reason = reason
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.reason}, so it has no second derivative: double backward is not possible; use "
            "torch.nn.functional's own (memkern.restore(model)) where it is needed"
        )


def once(grad: Tensor, reason: str = "a few-bit activation keeps its derivative rounded") -> Tensor:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
        return _NoSecondDerivative.apply(grad.detach().requires_grad_(), reason)
    return grad


class Codes(torch.autograd.Function):
    """An activation by its number, from codes of its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: int, a: float, b: float, table: Levels, inplace: bool) -> Tensor:
        y, codes, ctx.stride = encoded(x, fn, a, b, table, inplace)
        ctx.save_for_backward(codes)
        ctx.levels = table.levels
        if inplace:
            ctx.mark_dirty(x)
            return x
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (codes,) = ctx.saved_tensors
        grad = _ops.few_bit_backward(laid_out(grad, ctx.stride), codes, ctx.levels)
        return once(grad), None, None, None, None, None


class Output(torch.autograd.Function):
    """An activation with one minimum, its derivative from its output and the bit that says on which side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: int, valley: Valley) -> Tensor:
        y, codes, ctx.stride = encoded(x, fn, 0.0, 0.0, Levels(1, (), (valley.at,), (1,)))
        ctx.save_for_backward(y, codes)
        ctx.valley = valley
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        y, codes = ctx.saved_tensors
        grad = laid_out(grad, ctx.stride)
        return once(_ops.few_bit_backward_from_output(grad, y, codes, ctx.valley)), None, None


class Wrapped(torch.autograd.Function):
    """A user's own activation, from codes of its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Callable[[Tensor], Tensor], table: Levels) -> Tensor:
        y = fn(x)
        if y.shape != x.shape:
            raise ValueError(f"fn must work elementwise: {tuple(x.shape)} given, {tuple(y.shape)} came back")
        dense = x if same_layout(x, y) and is_dense(x.shape, x.stride()) else None
        if dense is None:
            dense = torch.empty_like(y, dtype=x.dtype).copy_(x)
        ctx.save_for_backward(_ops.few_bit_encode(dense, table))
        ctx.stride, ctx.levels = _stride_of(dense), table.levels
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (codes,) = ctx.saved_tensors
        return once(_ops.few_bit_backward(laid_out(grad, ctx.stride), codes, ctx.levels)), None, None
