"""Two linear layers with GELU between them, as one autograd function that saves only what its mode needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _ops
from ..quant.codec import ACTIVATIONS
from .autograd import activate_and_encode, no_second_derivative, with_stride
from .levels import Levels, check_bits
from .tables import LEVELS, VALLEYS

KEEPS = ("codes", "output", "input")


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        bias2: Tensor | None,
        name: str,
        bits: int,
        keep: str,
    ) -> Tensor:
        needs_x, needs_weight1, needs_bias1, needs_weight2 = ctx.needs_input_grad[:4]
        needs_hidden = (
            needs_x or needs_weight1 or needs_bias1
        )  # a gradient that passes through the activation
        hidden = F.linear(x, weight1, bias1)
        codes, ctx.stride = None, None
        if keep == "input" or not needs_hidden:
            output = _gelu(hidden, name)
        else:
            table = LEVELS[name, bits] if keep == "codes" else Levels(1, (), (VALLEYS[name].at,), (1,))
            output, codes, ctx.stride = activate_and_encode(hidden, ACTIVATIONS[name], 0.0, 0.0, table)
        ctx.save_for_backward(
            x if needs_weight1 else None,
            weight1 if needs_x else None,
            weight2 if needs_hidden else None,
            hidden if keep == "input" and (needs_hidden or needs_weight2) else None,
            output if keep != "input" and (needs_weight2 or (needs_hidden and keep == "output")) else None,
            codes,
        )
        ctx.name, ctx.bits, ctx.keep = name, bits, keep
        return F.linear(output, weight2, bias2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight1, weight2, hidden, output, codes = ctx.saved_tensors
        needs_x, needs_weight1, needs_bias1, needs_weight2, needs_bias2 = ctx.needs_input_grad[:5]
        grads: list[Tensor | None] = [None] * 8
        if needs_weight2:
            grads[3] = _weight_gradient(grad, _gelu(hidden, ctx.name) if ctx.keep == "input" else output)
        if needs_bias2:
            grads[4] = _flat(grad).sum(0)
        if needs_x or needs_weight1 or needs_bias1:
            grad = with_stride(grad @ weight2, ctx.stride)
            if ctx.keep == "input":
                approximate = "tanh" if ctx.name == "gelu_tanh" else "none"
                grad = torch.ops.aten.gelu_backward(grad, hidden, approximate=approximate)
            elif ctx.keep == "output":
                grad = _ops.few_bit_backward_from_output(grad, output, codes, VALLEYS[ctx.name])
            else:
                grad = _ops.few_bit_backward(grad, codes, LEVELS[ctx.name, ctx.bits].levels)
            if needs_x:
                grads[0] = grad @ weight1
            if needs_weight1:
                grads[1] = _weight_gradient(grad, x)
            if needs_bias1:
                grads[2] = _flat(grad).sum(0)
        return tuple(g if g is None else no_second_derivative(g) for g in grads)


def _gelu(x: Tensor, name: str) -> Tensor:
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return _flat(grad).t() @ _flat(x)


def check_mlp(approximate: str, bits: int, keep: str) -> None:
    """Raises ValueError where an option of :func:`mlp` is not one of those allowed."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    check_bits(bits)
    if keep not in KEEPS:
        raise ValueError(f"keep must be one of {', '.join(map(repr, KEEPS))}, got {keep!r}")


def mlp(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    approximate: str = "none",
    *,
    bits: int = 3,
    keep: str = "codes",
) -> Tensor:
    """``linear(gelu(linear(x, weight1, bias1)), weight2, bias2)``.

    x: (..., in). weight1: (hidden, in). weight2: (out, hidden). Saved for backward besides x, per element of the hidden
    layer, which takes b bytes:

    ==========  =================  ============================================
    ``keep``    bytes              gradient
    ==========  =================  ============================================
    (torch)     2 b                exact
    "codes"     b + bits / 8       derivative rounded to one of 2^bits levels
    "output"    b + 1 / 8          derivative computed from the output
    "input"     b                  exact; backward computes GELU a second time
    ==========  =================  ============================================

    Less is saved where some inputs need no gradient. Under autocast the layers compute in its dtype, like torch's.
    """
    check_mlp(approximate, bits, keep)
    device = x.device.type
    tensors = [x, weight1, bias1, weight2, bias2]
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        tensors = [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]
    name = "gelu" if approximate == "none" else "gelu_tanh"
    return _MLP.apply(*tensors, name, bits, keep)
