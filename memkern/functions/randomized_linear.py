"""A linear function that saves a random projection of its input for the weight's gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .autograd import SavesLess, apply, constant, needs_gradient, no_second_derivative, without_autocast
from .projection import PROJECTIONS, draw_seed, project

MIN_TOKENS = 128  # with fewer tokens the input takes little memory, and the gradient estimated from a fifth is noisy


def projected_tokens(share: float, tokens: int) -> int:
    """k: the number of projected tokens that are saved."""
    return max(1, round(share * tokens))


class _RandomizedLinear(SavesLess):
    """Returns the result, and what it saves: the projection, and a tag (:func:`no_second_derivative`)."""

    reason = "randomized_linear saves a random projection of its input"

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor, share: float, projection: str
    ) -> tuple[Tensor, ...]:
        tokens = x.shape[:-1].numel()
        # Computed here, as TorchDynamo takes no symbolic result for an argument of a function.
        k = projected_tokens(share, tokens)
        if torch.compiler.is_compiling():
            # Both passes must have one seed. torch 2.13's partitioner draws random numbers anew in the backward graph,
            # with other values, unless the forward graph's result depends on them. So the result gets a term of the
            # seed. The term is 0, as the seed's words are below 2^32.
            zero = (seed[0] >> 32).to(weight.dtype)
            y = F.linear(x, weight, zero.expand(len(weight)) if bias is None else bias + zero)
        else:
            y = F.linear(x, weight, bias)
        with without_autocast(x.device):
            projected = project(x.reshape(tokens, -1), k, projection, seed, y.dtype)
        return y, projected, x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, seed, _, ctx.projection = inputs
        _, projected, tag = output
        ctx.tokens, ctx.shape = x.shape[:-1].numel(), x.shape
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(projected)
        # The seed is saved as a tensor, like the projection that was made with it. Non-reentrant checkpointing replaces
        # saved tensors by those of the recomputed forward pass, which may draw another seed, but no attributes of ctx.
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, projected, seed, tag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        if grad is None:
            return (None,) * 6
        weight, projected, seed, tag = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        with torch.no_grad(), without_autocast(grad.device):
            rows = grad.reshape(ctx.tokens, -1)
            if ctx.needs_input_grad[0]:
                grad_x = rows.mm(weight.to(grad.dtype)).view(ctx.shape)
            if ctx.needs_input_grad[1]:
                grad_weight = project(rows, len(projected), ctx.projection, seed).t() @ projected
                grad_weight *= ctx.tokens / len(projected)
            if ctx.needs_input_grad[2]:
                grad_bias = rows.sum(0)
        grads = (
            g if g is None else no_second_derivative(g, tag, _RandomizedLinear.reason)
            for g in (grad_x, grad_weight, grad_bias)
        )
        return *grads, None, None, None


def check_options(share: float, projection: str, min_tokens: int) -> None:
    """Raises ValueError for an option of :func:`randomized_linear` that is out of range."""
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share!r}")
    if projection not in PROJECTIONS:
        raise ValueError(f"projection must be one of {', '.join(map(repr, PROJECTIONS))}, got {projection!r}")
    if isinstance(min_tokens, bool) or not isinstance(min_tokens, int) or min_tokens < 0:
        raise ValueError(f"min_tokens must be a whole number, 0 or more, got {min_tokens!r}")


def randomized_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    share: float = 0.2,
    projection: str = "rows",
    generator: torch.Generator | None = None,
    min_tokens: int = MIN_TOKENS,
) -> Tensor:
    r"""``x W^T + b`` that saves a random projection of x for the backward pass, ``share`` times as large as x.

    For x with N tokens (its leading dimensions), ``k = round(share * N)`` and a random S with E[S^T S] = (k / N) I::

        y      = x W^T + b                          as torch computes it
        grad_x = grad_y W                           as torch computes it
        grad_b = sum of grad_y over tokens          as torch computes it
        grad_W = N / k (S grad_y)^T (S x)           unbiased; its variance is in memkern.functions.projection

    Args:
        x: (..., in), floating point.
        weight: (out, in). bias: (out), or None.
        share: k / N, above 0 and at most 1; 1 is torch's own layer. Default 0.2.
        projection: ``"rows"`` or ``"dct"``. Default ``"rows"``.
        generator: draws the seed of a call; default torch's global one of x's device. Under torch.compile a generator
            breaks the graph.
        min_tokens: with fewer tokens it is torch's own layer. Default 128.

    Saved per call: ``k * in`` elements of y's dtype and a seed of 16 bytes; that is ``share * in * itemsize`` bytes per
    token, where torch's layer saves ``in * itemsize`` (or nothing of its own where another operator saves x anyway).
    Nothing where the weight needs no gradient. Every call draws its own seed on x's device and saves it with the
    projection, so that recomputation under checkpointing does not mix the two of different calls.

    torch.func.grad and vmap (with its ``randomness`` given) go through it. The second derivative, forward-mode AD and
    ONNX export raise RuntimeError.

    Raises:
        ValueError: share, projection or min_tokens out of range.

    Source: Bershatsky et al., "Memory-Efficient Backpropagation through Large Linear Layers" (arXiv 2201.13195).
    """
    check_options(share, projection, min_tokens)
    # Also under torch.export, and before tokens are compared, which would bind the program to some numbers of tokens.
    if not needs_gradient(weight):
        return F.linear(x, weight, bias)
    tokens, share = x.shape[:-1].numel(), constant(share)
    if tokens < min_tokens or projected_tokens(share, tokens) >= tokens:
        return F.linear(x, weight, bias)
    return apply(_RandomizedLinear, x, weight, bias, draw_seed(x.device, generator), share, projection)
