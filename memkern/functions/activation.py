"""Activations that save codes of their derivative for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _ops
from ..backend import select
from ..fewbit.activations import Activation, activation_of
from ..fewbit.levels import check_bits
from ..quant.layout import FLOATS, is_dense, same_layout
from .autograd import SavesLess, apply, is_eager, needs_gradient, no_second_derivative

# Activations that the fused op does not compute: a user's function (""); softplus, which autocast runs in fp32, but not
# the fused op; and log-sigmoid, whose result on a CPU is contiguous whatever its input's strides.
_NOT_FUSED = ("", "softplus", "logsigmoid")


def activate(
    x: Tensor,
    name: str,
    bits: int = 1,
    keep: str = "codes",
    inplace: bool = False,
    parameters: tuple[float, float] | None = None,
) -> Tensor:
    """An activation by its name: torch's own where no gradient is needed. parameters: a and b of Activation."""
    check_bits(bits)
    activation = activation_of(name, bits, keep, parameters)
    if not needs_gradient(x):
        return activation.forward(x, inplace=True) if inplace else activation.forward(x)
    if x.dtype not in FLOATS:
        check_dtype(x)
    if not inplace:
        return apply(FewBit, x, activation, None)
    if not is_eager():
        # torch.func and torch.compile take the result as a new tensor that is copied to x.
        return x.copy_(apply(FewBit, x, activation, None))
    if x.is_leaf:
        raise RuntimeError("inplace=True cannot change a leaf tensor that requires a gradient; use inplace=False")
    codes = _ops.few_bit_encode(_dense(x.detach(), x), activation.levels)  # before x is overwritten
    return apply(FewBit, x, activation, codes)


def check_dtype(x: Tensor) -> None:
    """Raises TypeError for a dtype that no kernel has codes for."""
    if x.dtype not in FLOATS and select(x.device) != "reference":
        raise TypeError(
            f"x must be float32, bfloat16 or float16 where it needs a gradient, got {x.dtype}; torch.nn.functional has "
            "the function for it"
        )


def _dense(x: Tensor, result: Tensor) -> Tensor:
    """x in the memory order of the result, which is the order of the codes."""
    if x.is_contiguous() and result.is_contiguous():
        return x
    if same_layout(x, result) and is_dense(x.shape, x.stride()):
        return x
    return torch.empty_like(result, dtype=x.dtype).copy_(x)


def activate_and_encode(x: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """The activation of ``x``, and its codes, which are in the memory order of the result."""
    if activation.name not in _NOT_FUSED and (x.is_contiguous() or is_dense(x.shape, x.stride())):
        return _ops.few_bit_forward(x, activation)
    version = x._version if is_eager() and not x.is_inference() else None  # inference tensors have none
    y = activation.forward(x)
    if y.shape != x.shape:
        raise ValueError(f"fn must work elementwise: {tuple(x.shape)} given, {tuple(y.shape)} came back")
    if version is not None and x._version != version:
        raise ValueError("fn must not change its argument in place: the codes are made from it")
    return y, _ops.few_bit_encode(_dense(x, y), activation.levels)


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


class FewBit(SavesLess):
    """An activation that saves codes of its derivative, or its output and a bit per element.

    codes: where x is changed in place, the codes of its values before; else None, and ``forward`` makes them. In place
    the function has one result, as autograd allows no more for a function that changes a view.
    """

    @staticmethod
    def forward(x: Tensor, activation: Activation, codes: Tensor | None) -> Any:
        if codes is not None:
            return activation.forward(x, inplace=True)
        return *activate_and_encode(x, activation), x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, activation, codes = inputs
        # Through the tag a second derivative raises (no_second_derivative). In place it is no result, but a new leaf.
        if codes is None:
            y, codes, tag = output
            ctx.mark_non_differentiable(codes)
        else:
            y, tag = output, x.new_empty(0, requires_grad=True)
            ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(codes, tag, *([] if activation.two_branch is None else [y]))
        ctx.stride, ctx.activation = stride_of(y), activation

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        if grad is None:
            return None, None, None
        codes, tag, *output = ctx.saved_tensors
        grad, activation = with_stride(grad, ctx.stride), ctx.activation
        if output:
            grad = _ops.few_bit_backward_from_output(grad, output[0], codes, activation.two_branch)
        else:
            grad = _ops.few_bit_backward(grad, codes, activation.levels.levels)
        return no_second_derivative(grad, tag), None, None
