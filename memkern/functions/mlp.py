"""Two linear layers with GELU between them, as one autograd function that saves only what its mode needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _ops
from ..fewbit.activations import activation_of
from ..fewbit.levels import check_bits
from .activation import activate_and_encode
from .autograd import SavesLess, apply, autocast_dtype, needs_gradient, no_second_derivative

KEEPS = ("codes", "output", "input")


class _MLP(SavesLess):
    """needs: whether x, weight1, bias1 and weight2 may need a gradient. The last result is :class:`SavesLess`'s tag."""

    @staticmethod
    def forward(
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        bias2: Tensor | None,
        name: str,
        bits: int,
        keep: str,
        needs: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:
        *needs_hidden, needs_weight2 = needs
        encodes = keep != "input" and any(needs_hidden)  # a gradient passes through the activation
        hidden = F.linear(x, weight1, bias1).contiguous()
        codes = None
        if encodes:
            output, codes = activate_and_encode(hidden, activation_of(name, bits, keep))
        else:
            output = _gelu(hidden, name)
        y = F.linear(output, weight2, bias2)
        if keep == "input":
            return y, hidden if any(needs) else None, None, None, x.new_empty(0)
        saves_output = needs_weight2 or (encodes and keep == "output")
        return y, None, output if saves_output else None, codes, x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        x, weight1, _, weight2, _, ctx.name, bits, ctx.keep, _ = inputs
        if ctx.keep != "input":
            ctx.activation = activation_of(ctx.name, bits, ctx.keep)
        _, hidden, activated, codes, tag = output
        needs_x, needs_weight1, needs_bias1 = ctx.needs_input_grad[:3]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in (hidden, activated, codes) if t is not None))
        ctx.save_for_backward(
            x if needs_weight1 else None,
            weight1 if needs_x else None,
            weight2 if needs_x or needs_weight1 or needs_bias1 else None,
            hidden,
            activated,
            codes,
            tag,
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        if grad is None:
            return (None,) * 9
        x, weight1, weight2, hidden, output, codes, tag = ctx.saved_tensors
        needs_x, needs_weight1, needs_bias1, needs_weight2, needs_bias2 = ctx.needs_input_grad[:5]
        grads: list[Tensor | None] = [None] * 9
        if needs_weight2:
            grads[3] = _weight_gradient(grad, _gelu(hidden, ctx.name) if ctx.keep == "input" else output)
        if needs_bias2:
            grads[4] = _flat(grad).sum(0)
        if needs_x or needs_weight1 or needs_bias1:
            grad = (grad @ weight2).contiguous()
            if ctx.keep == "input":
                approximate = "tanh" if ctx.name == "gelu_tanh" else "none"
                grad = torch.ops.aten.gelu_backward(grad, hidden, approximate=approximate)
            elif ctx.keep == "output":
                grad = _ops.few_bit_backward_from_output(grad, output, codes, ctx.activation.two_branch)
            else:
                grad = _ops.few_bit_backward(grad, codes, ctx.activation.levels.levels)
            if needs_x:
                grads[0] = grad @ weight1
            if needs_weight1:
                grads[1] = _weight_gradient(grad, x)
            if needs_bias1:
                grads[2] = _flat(grad).sum(0)
        return tuple(g if g is None else no_second_derivative(g, tag) for g in grads)


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
    tensors = [x, weight1, bias1, weight2, bias2]
    if (dtype := autocast_dtype(x.device.type)) is not None:
        tensors = [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]
    name = "gelu" if approximate == "none" else "gelu_tanh"
    needs = tuple(map(needs_gradient, tensors))
    if not any(needs):
        hidden = F.linear(tensors[0], tensors[1], tensors[2])  # type: ignore[arg-type]
        return F.linear(_gelu(hidden, name), tensors[3], tensors[4])  # type: ignore[arg-type]
    return apply(_MLP, *tensors, name, bits, keep, needs[:4])
