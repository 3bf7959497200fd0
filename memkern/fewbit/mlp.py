"""Two linear layers with GELU between them, as one autograd function that keeps what its mode needs and no more."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _ops
from ..quant.codec import ACTIVATIONS
from .autograd import encoded, laid_out, once
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
        # What each gradient asks for; the derivative serves those before the activation.
        wants_x, wants_1, wants_b1, wants_2 = ctx.needs_input_grad[:4]
        before = wants_x or wants_1 or wants_b1
        hidden = F.linear(x, weight1, bias1)
        codes, ctx.stride = None, None
        if keep == "input" or not before:
            output = _gelu(hidden, name)
        else:
            table = LEVELS[name, bits] if keep == "codes" else Levels(1, (), (VALLEYS[name].at,), (1,))
            output, codes, ctx.stride = encoded(hidden, ACTIVATIONS[name], 0.0, 0.0, table)
        ctx.save_for_backward(
            x if wants_1 else None,
            weight1 if wants_x else None,
            weight2 if before else None,
            hidden if keep == "input" and (before or wants_2) else None,
            output if keep != "input" and (wants_2 or (before and keep == "output")) else None,
            codes,
        )
        ctx.name, ctx.bits, ctx.keep = name, bits, keep
        return F.linear(output, weight2, bias2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight1, weight2, hidden, output, codes = ctx.saved_tensors
        wants_x, wants_1, wants_b1, wants_2, wants_b2 = ctx.needs_input_grad[:5]
        grads: list[Tensor | None] = [None] * 8
        if wants_2:
            grads[3] = _weight_gradient(grad, _gelu(hidden, ctx.name) if ctx.keep == "input" else output)
        if wants_b2:
            grads[4] = _flat(grad).sum(0)
        if wants_x or wants_1 or wants_b1:
            grad = laid_out(grad @ weight2, ctx.stride)
            if ctx.keep == "input":
                approximate = "tanh" if ctx.name == "gelu_tanh" else "none"
                grad = torch.ops.aten.gelu_backward(grad, hidden, approximate=approximate)
            elif ctx.keep == "output":
                grad = _ops.few_bit_backward_from_output(grad, output, codes, VALLEYS[ctx.name])
            else:
                grad = _ops.few_bit_backward(grad, codes, LEVELS[ctx.name, ctx.bits].levels)
            if wants_x:
                grads[0] = grad @ weight1
            if wants_1:
                grads[1] = _weight_gradient(grad, x)
            if wants_b1:
                grads[2] = _flat(grad).sum(0)
        return tuple(g if g is None else once(g) for g in grads)


def _gelu(x: Tensor, name: str) -> Tensor:
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return _flat(grad).t() @ _flat(x)


def check_mlp(approximate: str, bits: int, keep: str) -> None:
    """Raises ValueError unless these are options of :func:`mlp`."""
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

    x: (..., in). weight1: (hidden, in). weight2: (out, hidden). Kept per hidden element of b bytes, besides x:

    ==========  =================  ============================================
    ``keep``    bytes              gradient
    ==========  =================  ============================================
    (torch)     2 b                exact
    "codes"     b + bits / 8       derivative rounded to one of 2^bits levels
    "output"    b + 1 / 8          derivative found from the output
    "input"     b                  exact; GELU is computed once more
    ==========  =================  ============================================

    Only what the gradients that are asked for need is kept. Under autocast the layers compute in its dtype, like
    torch's.
    """
    check_mlp(approximate, bits, keep)
    device = x.device.type
    tensors = [x, weight1, bias1, weight2, bias2]
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        tensors = [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]
    name = "gelu" if approximate == "none" else "gelu_tanh"
    return _MLP.apply(*tensors, name, bits, keep)
