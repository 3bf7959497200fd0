"""The autograd functions behind :mod:`memkern.functional`'s activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from ..fewbit.levels import Levels, TwoBranch
from ..quant.codec import ACTIVATIONS
from ..quant.layout import is_dense, same_layout
from ..reference.activation import activate
from .autograd import SavesLess, no_second_derivative

# Autocast runs these in fp32. torch's op is dispatched through autocast, the fused op is not.
_AUTOCAST_TO_FP32 = (ACTIVATIONS["softplus"],)


def activate_and_encode(
    x: Tensor, fn: int, a: float, b: float, table: Levels, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """The activation of ``x``, and its codes, which are in the memory order of the result."""
    dense = x.is_contiguous() or is_dense(x.shape, x.stride())
    if inplace:
        codes = _ops.few_bit_encode(x if dense else torch.empty_like(x).copy_(x), table)
        y = activate(x, fn, a, b, inplace=True)
    elif dense and fn not in _AUTOCAST_TO_FP32:
        y, codes = _ops.few_bit_forward(x, fn, a, b, table)
    else:
        y = activate(x, fn, a, b)
        codes = _ops.few_bit_encode(x if dense else torch.empty_like(y, dtype=x.dtype).copy_(x), table)
    return y, codes


def stride_of(x: Tensor) -> tuple[int, ...] | None:
    """The strides of ``torch.empty_like(x)``; None if they are contiguous."""
    return None if x.is_contiguous() else torch.empty_like(x, device="meta").stride()


def with_stride(grad: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """``grad`` with the strides of the tensor that was encoded (None: contiguous); a copy where it has others."""
    if stride is None:
        return grad.contiguous()
    if grad.stride() == stride:
        return grad
    return grad.new_empty_strided(grad.shape, stride).copy_(grad)


def _save(ctx: Any, codes: Tensor, tag: Tensor, *others: Tensor) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(codes)
    ctx.save_for_backward(codes, tag, *others)


def _backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
    """The gradient times the levels that the codes stand for."""
    if grad is None:
        return None
    codes, tag = ctx.saved_tensors
    return no_second_derivative(_ops.few_bit_backward(with_stride(grad, ctx.stride), codes, ctx.levels), tag)


class Codes(SavesLess):
    """An activation, given by its number in ACTIVATIONS; saves codes of the derivative."""

    @staticmethod
    def forward(x: Tensor, fn: int, a: float, b: float, table: Levels) -> tuple[Tensor, ...]:
        return *activate_and_encode(x, fn, a, b, table), x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        table = inputs[4]
        y, codes, tag = output
        _save(ctx, codes, tag)
        ctx.stride, ctx.levels = stride_of(y), table.levels

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        return _backward(ctx, grad), None, None, None, None


class EagerCodes(SavesLess):
    """:class:`Codes` outside of torch.compile and torch.func: with a context of its own forward takes 20 us less.

    In place of x it returns one tensor, as torch allows no more where x is a view.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: int, a: float, b: float, table: Levels, inplace: bool) -> Any:
        y, codes = activate_and_encode(x, fn, a, b, table, inplace)
        # Through the tag a second derivative comes to this function and raises: as a result, or as a leaf of its own.
        tag = x.new_empty(0, requires_grad=inplace)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(codes, tag)
        ctx.stride, ctx.levels = stride_of(y), table.levels
        if not inplace:
            return y, tag
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        return _backward(ctx, grad), None, None, None, None, None


class Output(SavesLess):
    """An activation with one minimum; saves its output, and a bit per element: on which side of the minimum x is."""

    @staticmethod
    def forward(x: Tensor, fn: int, two_branch: TwoBranch) -> tuple[Tensor, ...]:
        y, codes = activate_and_encode(x, fn, 0.0, 0.0, Levels(1, (), (two_branch.at,), (1,)))
        return y, codes, x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        y, codes, tag = output
        _save(ctx, codes, tag, y)
        ctx.stride, ctx.two_branch = stride_of(y), inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        if grad is None:
            return None, None, None
        codes, tag, y = ctx.saved_tensors
        grad = _ops.few_bit_backward_from_output(with_stride(grad, ctx.stride), y, codes, ctx.two_branch)
        return no_second_derivative(grad, tag), None, None


class Wrapped(SavesLess):
    """A user's own activation; saves codes of the derivative."""

    @staticmethod
    def forward(x: Tensor, fn: Callable[[Tensor], Tensor], table: Levels) -> tuple[Tensor, ...]:
        y = fn(x)
        if y.shape != x.shape:
            raise ValueError(f"fn must work elementwise: {tuple(x.shape)} given, {tuple(y.shape)} came back")
        dense = x if same_layout(x, y) and is_dense(x.shape, x.stride()) else None
        if dense is None:
            dense = torch.empty_like(y, dtype=x.dtype).copy_(x)
        return y, _ops.few_bit_encode(dense, table), x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        y, codes, tag = output
        _save(ctx, codes, tag)
        ctx.stride, ctx.levels = stride_of(y), inputs[2].levels

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        return _backward(ctx, grad), None, None
