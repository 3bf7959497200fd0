"""Gated linear units that save gate and up alone; the backward pass computes activation and product again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .autograd import SavesLess, apply, is_eager, needs_gradient

SILU, GELU, GELU_TANH = "silu", "gelu", "gelu_tanh"


def _activate(gate: Tensor, activation: str) -> Tensor:
    if activation == SILU:
        return F.silu(gate)
    return F.gelu(gate, approximate="none" if activation == GELU else "tanh")


def _activation_backward(grad: Tensor, gate: Tensor, activation: str) -> Tensor:
    if activation == SILU:
        if torch.is_grad_enabled():  # create_graph=True: torch's kernel has no derivative of its own
            s = torch.sigmoid(gate)
            return grad * s * (1 + gate * (1 - s))
        return torch.ops.aten.silu_backward(grad, gate)
    return torch.ops.aten.gelu_backward(grad, gate, approximate="none" if activation == GELU else "tanh")


def halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gate and up, of one tensor that holds both along its last dimension or of two."""
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, -1)
    return first, second


def _backward_of_gate_up(grad: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    """The gradient of the tensor that holds gate and up, written into its halves where nothing traces it."""
    gate, up = halves(gate_up, None)
    # A batched tensor is torch.autograd.grad's with is_grads_batched. The check is last: TorchDynamo cannot trace it.
    if torch.is_grad_enabled() or not is_eager() or torch._C._functorch.is_legacy_batchedtensor(grad):
        grad_gate = _activation_backward(grad * up, gate, activation)
        return torch.cat((grad_gate, grad * _activate(gate, activation)), -1)
    result = torch.empty_like(gate_up)
    grad_gate, grad_up = halves(result, None)
    torch.mul(grad, _activate(gate, activation), out=grad_up)
    torch.mul(grad, up, out=grad_gate)
    if activation == SILU:
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
    else:
        approximate = "none" if activation == GELU else "tanh"
        torch.ops.aten.gelu_backward.grad_input(grad_gate, gate, approximate=approximate, grad_input=grad_gate)
    return result


class Glu(SavesLess):
    """act(gate) * up, from gate and up."""

    reason = "swiglu and geglu save their inputs alone"

    @staticmethod
    def forward(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
        first, second = halves(gate, up)
        return _activate(first, activation) * second

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        gate, up, ctx.activation = inputs
        ctx.save_for_backward(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        if up is None:
            return _backward_of_gate_up(grad, gate, ctx.activation), None, None
        grad_up = grad * _activate(gate, ctx.activation) if ctx.needs_input_grad[1] else None
        grad_gate = None
        if ctx.needs_input_grad[0]:
            grad_gate = _activation_backward(grad * up, gate, ctx.activation)
        return grad_gate, grad_up, None


def check(gate: Tensor, up: Tensor | None) -> None:
    """Raises ValueError or TypeError unless gate and up fit together."""
    if up is None:
        if gate.dim() == 0 or gate.shape[-1] % 2:
            raise ValueError(
                f"gate must hold gate and up along its last dimension, an even number; got {tuple(gate.shape)}"
            )
    elif gate.shape != up.shape:
        raise ValueError(f"up must have the shape of gate, {tuple(gate.shape)}, got {tuple(up.shape)}")
    elif gate.dtype != up.dtype:
        raise TypeError(f"up must have the dtype of gate, {gate.dtype}, got {up.dtype}")


def glu(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """``activation(gate) * up``; without ``up``, gate holds both."""
    check(gate, up)
    if needs_gradient(gate) or needs_gradient(up):
        return apply(Glu, gate, up, activation)
    first, second = halves(gate, up)
    return _activate(first, activation) * second
