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

# Autocast runs these in fp32. torch's op is dispatched through autocast, the fused op is not.
_AUTOCAST_TO_FP32 = (ACTIVATIONS["softplus"],)


def activate_and_encode(
    x: Tensor, fn: int, a: float, b: float, table: Levels, inplace: bool = False
) -> tuple[Tensor, Tensor, tuple[int, ...] | None]:
    """The activation of ``x``, its codes, and the strides in whose memory order the codes are (None: contiguous)."""
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


def with_stride(grad: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """``grad`` with the strides of the tensor that was encoded (None: contiguous); a copy where it has others."""
    if stride is None:
        return grad.contiguous()
    if grad.stride() == stride:
        return grad
    return grad.new_empty_strided(grad.shape, stride).copy_(grad)


class _NoSecondDerivative(torch.autograd.Function):
    """The identity on a gradient; its own backward raises.

    torch's once_differentiable gives a wrong result without an error where the incoming gradient is a constant.
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


def no_second_derivative(
    grad: Tensor, reason: str = "a few-bit activation saves its derivative rounded"
) -> Tensor:
    """``grad``, made to raise RuntimeError with ``reason`` if it is differentiated in turn."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
        return _NoSecondDerivative.apply(grad.detach().requires_grad_(), reason)
    return grad


class Codes(torch.autograd.Function):
    """An activation, given by its number in ACTIVATIONS; saves codes of the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: int, a: float, b: float, table: Levels, inplace: bool) -> Tensor:
        y, codes, ctx.stride = activate_and_encode(x, fn, a, b, table, inplace)
        ctx.save_for_backward(codes)
        ctx.levels = table.levels
        if inplace:
            ctx.mark_dirty(x)
            return x
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (codes,) = ctx.saved_tensors
        grad = _ops.few_bit_backward(with_stride(grad, ctx.stride), codes, ctx.levels)
        return no_second_derivative(grad), None, None, None, None, None


class Output(torch.autograd.Function):
    """An activation with one minimum; saves its output, and a bit per element: on which side of the minimum x is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: int, valley: Valley) -> Tensor:
        y, codes, ctx.stride = activate_and_encode(x, fn, 0.0, 0.0, Levels(1, (), (valley.at,), (1,)))
        ctx.save_for_backward(y, codes)
        ctx.valley = valley
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        y, codes = ctx.saved_tensors
        grad = _ops.few_bit_backward_from_output(with_stride(grad, ctx.stride), y, codes, ctx.valley)
        return no_second_derivative(grad), None, None


class Wrapped(torch.autograd.Function):
    """A user's own activation; saves codes of the derivative."""

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
        grad = _ops.few_bit_backward(with_stride(grad, ctx.stride), codes, ctx.levels)
        return no_second_derivative(grad), None, None
