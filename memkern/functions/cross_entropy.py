"""Cross entropy of a linear layer's outputs in chunks of classes: all logits never exist at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from ..quant.layout import arithmetic
from .autograd import SavesLess, apply, autocast_dtype, is_recorded, no_second_derivative, without_autocast
from .loops import few_iterations

REDUCTIONS = ("mean", "sum", "none")
CHUNK_ELEMENTS = 2**22  # of logits: 16 MiB in fp32
MIN_CHUNK = 128  # with fewer columns a matrix product is slow


class _Rows(NamedTuple):
    """The target and the factors of each row's loss; tensors of shape (tokens,)."""

    target: Tensor
    """The class, 0 where the row is ignored."""
    nll: Tensor
    """The factor of log p of the target: (1 - label_smoothing) * class weight, 0 where the row is ignored."""
    smooth: Tensor | None
    """The factor of the sum of all classes' weighted log p: label_smoothing / classes, 0 where ignored; or None."""


class _LinearCrossEntropy(SavesLess):
    """The loss of every row, ``chunk_size`` classes at a time, and its gradients from logits computed once more.

    A row's largest logit and the logarithm of the sum of exp(logit - largest) stay two numbers: for large logits their
    sum would be rounded by more than the small loss of a row whose target has almost all of the probability.

    Chunks of classes and not of rows: a chunk's rows of the weight's gradient are one matrix product, so that nothing
    is accumulated over chunks in a buffer as large as the weight, and half-precision gradients are rounded once.
    """

    reason = "linear_cross_entropy computes its gradient in chunks"

    @staticmethod
    def forward(
        x: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        weight: Tensor | None,
        target: Tensor,
        nll: Tensor,
        smooth: Tensor | None,
        chunk_size: int,
    ) -> tuple[Tensor, ...]:
        chunks = _chunks(linear_weight, chunk_size)
        highest, logs = nll.new_empty(2, len(chunks), len(nll))
        picked, weighted = torch.zeros_like(nll), torch.zeros_like(nll)
        with without_autocast(x.device):
            for i, columns in enumerate(few_iterations(chunks, x)):
                logits = _logits(x, linear_weight, linear_bias, columns)
                index, inside = _locate(target, columns)
                picked = torch.where(inside, logits.gather(1, index)[:, 0], picked)
                highest[i] = logits.amax(1)
                if smooth is not None:
                    near = logits - _finite(highest[0])[:, None]
                    weighted += near.sum(1) if weight is None else near.mv(weight[columns].to(near.dtype))
                logs[i] = logits.sub_(_finite(highest[i])[:, None]).exp_().sum(1).log_()
        top = _finite(highest.amax(0))
        log_sum = (logs + (_finite(highest) - top)).logsumexp(0)
        loss = nll * (log_sum - (picked - top))
        if smooth is not None:
            loss += smooth * (_weight_sum(weight, linear_weight) * (log_sum + (top - _finite(highest[0]))) - weighted)
        # An ignored row may have infinite logits.
        loss = torch.where(nll + (0 if smooth is None else smooth) == 0, 0, loss)
        return loss, top, log_sum, x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.chunk_size = inputs
        _, top, log_sum, tag = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(top, log_sum)
        ctx.save_for_backward(*tensors, top, log_sum, tag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        if grad is None:
            return (None,) * 8
        x, linear_weight, linear_bias, weight, *row_tensors, top, log_sum, tag = ctx.saved_tensors
        with torch.no_grad(), without_autocast(x.device):
            target, nll, smooth = _Rows(*row_tensors)
            rows = _Rows(target, _times(nll, grad), None if smooth is None else _times(smooth, grad))
            grads = _gradients(ctx, x, linear_weight, linear_bias, weight, rows, top, log_sum)
        reason = _LinearCrossEntropy.reason
        return *(g if g is None else no_second_derivative(g, tag, reason) for g in grads), *[None] * 5


def _finite(highest: Tensor) -> Tensor:
    """The number subtracted from logits before exp: their maximum, but 0 for one that is infinite."""
    return torch.where(highest.isinf(), 0, highest)


def _times(factor: Tensor, grad: Tensor) -> Tensor:
    """factor * grad, but 0 where the factor is 0: the mean's gradient is infinite where all rows are ignored."""
    return torch.where(factor == 0, 0, factor * grad)


def _chunks(linear_weight: Tensor, chunk_size: int) -> Sequence[slice]:
    """The ranges of classes whose logits are computed together."""
    classes = len(linear_weight)
    return [slice(start, min(start + chunk_size, classes)) for start in range(0, classes, chunk_size)]


def _logits(x: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, columns: slice) -> Tensor:
    """A chunk of the logits: in x's dtype, as a linear layer computes them, then in fp32 (fp64 where x is)."""
    bias = None if linear_bias is None else linear_bias[columns].to(x.dtype)
    logits = F.linear(x, linear_weight[columns].to(x.dtype), bias)
    return logits.to(arithmetic(x.dtype))


def _locate(target: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Each row's class as a column of the chunk, (tokens, 1), and whether it is in the chunk."""
    index = target - columns.start
    inside = (index >= 0) & (target < columns.stop)
    return torch.where(inside, index, 0)[:, None], inside


def _weight_sum(weight: Tensor | None, linear_weight: Tensor) -> Tensor | int:
    """The sum of the class weights."""
    return len(linear_weight) if weight is None else weight.sum()


def _gradients(
    ctx: Any,
    x: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    rows: _Rows,
    top: Tensor,
    log_sum: Tensor,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, the weight and the bias; that of row i's logit c is
    ``(nll_i + smooth_i * sum of weights) * p_ic - nll_i * [c = target_i] - smooth_i * weight_c``.
    """
    grad_x = torch.zeros_like(x, dtype=top.dtype) if ctx.needs_input_grad[0] else None
    grad_weight = torch.empty_like(linear_weight) if ctx.needs_input_grad[1] else None
    grad_bias = torch.empty_like(linear_bias) if ctx.needs_input_grad[2] and linear_bias is not None else None
    total = rows.nll if rows.smooth is None else rows.nll + rows.smooth * _weight_sum(weight, linear_weight)
    for columns in few_iterations(_chunks(linear_weight, ctx.chunk_size), x):
        g = _logits(x, linear_weight, linear_bias, columns).sub_(top[:, None]).sub_(log_sum[:, None])
        g.exp_().mul_(total[:, None])
        index, inside = _locate(rows.target, columns)
        g.scatter_add_(1, index, torch.where(inside, -rows.nll, 0)[:, None])
        if rows.smooth is not None and weight is not None:
            g.addr_(rows.smooth, weight[columns], alpha=-1)
        elif rows.smooth is not None:
            g -= rows.smooth[:, None]
        if grad_bias is not None:
            grad_bias[columns] = g.sum(0)
        g = g.to(x.dtype)
        if grad_x is not None:
            grad_x += g @ linear_weight[columns].to(x.dtype)
        if grad_weight is not None:
            grad_weight[columns] = g.t() @ x
    return None if grad_x is None else grad_x.to(x.dtype), grad_weight, grad_bias


def check_options(reduction: str, label_smoothing: float, chunk_size: int | None) -> None:
    """Raises ValueError for an option of :func:`linear_cross_entropy` that is out of range."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
    if not isinstance(label_smoothing, (int, float)) or not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be a number from 0 to 1, got {label_smoothing!r}")
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"chunk_size must be None or a number of classes, 1 or more, got {chunk_size!r}")


def _check_shapes(
    x: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None
) -> None:
    if linear_weight.dim() != 2 or not len(linear_weight):
        raise ValueError(f"linear_weight must be of shape (classes, in), got {tuple(linear_weight.shape)}")
    classes, features = linear_weight.shape
    if x.dim() < 1 or x.shape[-1] != features:
        raise ValueError(f"input must be of shape (..., {features}) as linear_weight's, got {tuple(x.shape)}")
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target must be class indices, int64 or int32 (no probabilities), got {target.dtype}")
    if target.shape != x.shape[:-1]:
        raise ValueError(f"target must be of shape {tuple(x.shape[:-1])} as input's rows, got {tuple(target.shape)}")
    for name, vector in (("linear_bias", linear_bias), ("weight", weight)):
        if vector is not None and tuple(vector.shape) != (classes,):
            raise ValueError(f"{name} must be of shape ({classes},), a number per class, got {tuple(vector.shape)}")


def _check_target(target: Tensor, valid: Tensor, classes: int) -> None:
    is_outside = valid & ((target < 0) | (target >= classes))
    allowed = f"target must be from 0 to {classes - 1}, or ignore_index"
    if target.device.type != "cpu" or isinstance(target, FakeTensor) or torch.compiler.is_compiling():
        torch._assert_async(~is_outside.any(), allowed)  # without waiting for the device
    elif bool(is_outside.any()):
        raise IndexError(f"{allowed}, got {int(target[is_outside][0])}")


def _compute_dtype(x: Tensor, linear_weight: Tensor) -> torch.dtype:
    """The dtype of the matrix products: autocast's, where it is on."""
    if (autocast := autocast_dtype(x.device.type)) is not None:
        return x.dtype if x.dtype == torch.float64 else autocast
    if x.dtype != linear_weight.dtype:
        raise TypeError(f"input and linear_weight must have the same dtype, got {x.dtype} and {linear_weight.dtype}")
    return x.dtype


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk_size: int | None = None,
) -> Tensor:
    r"""``cross_entropy(linear(input, linear_weight, linear_bias), target)`` without more than a chunk of the logits.

    The logits of ``chunk_size`` classes at a time are computed, go into the loss and are freed. The backward pass
    computes them once more. With p = softmax of the logits z, w the class weights, e = label_smoothing and C classes::

        loss_i     = (1 - e) w_t (lse(z_i) - z_it) + e / C * sum over c of w_c (lse(z_i) - z_ic)      t = target_i
        dloss/dz_c = ((1 - e) w_t + e / C * sum of w) p_c - (1 - e) w_t [c = t] - e / C * w_c

    Args:
        input: (..., in), floating point.
        linear_weight: (classes, in), for instance an embedding's (tied weights). linear_bias: (classes,), or None.
        target: class indices of input's leading shape, int64 or int32.
        weight: (classes,), the classes' weights, or None. It gets no gradient.
        reduction: ``"mean"`` (over the rows' weights, as torch's), ``"sum"`` or ``"none"``. Default ``"mean"``.
        ignore_index: rows with this target have loss 0 and no gradient. Default -100.
        label_smoothing: from 0 to 1. Default 0.
        chunk_size: classes at a time; default as many as make 2^22 logits (16 MiB in fp32), 128 at least.

    Returns the loss in float32, float64 for float64 inputs: (), or target's shape with ``reduction="none"``. Logits of
    half-precision inputs are rounded to their dtype, as a linear layer's are, and everything after is float32; the
    gradients of the logits are rounded before the matrix products, as torch's. Under autocast the products are in its
    dtype, and weight and gradient are cast a chunk at a time.

    Bytes: saved for backward are input, 24 per row, and what exists anyway. At any time there are at most two
    buffers of rows x chunk_size in float32 and one in input's dtype, where torch has three of rows x classes. The
    gradients of the weight and the bias are written as they are computed, once, without a buffer to accumulate them.
    That is why the chunks are of classes and the logits are computed twice: chunks of rows, with the gradients made in
    the forward pass, take three matrix products in place of four, but hold the weight's gradient in fp32 beside the
    one that is returned. See docs/what-does-not-fit.md.

    torch.func.grad goes through it. The second derivative, forward-mode AD and ONNX export raise RuntimeError.

    Raises:
        ValueError, TypeError: an option, a shape or a dtype that is not as above.
        IndexError: a target that is no class; where it is not on the CPU, by the device's assertion.

    Sources: the chunks are those of Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models"
    (arXiv 2411.09009), as matrix products of torch; the arguments are those of torch.nn.functional's function of this
    name (torch 2.13), whose chunks are of rows and which has no label smoothing.
    """
    check_options(reduction, label_smoothing, chunk_size)
    _check_shapes(input, linear_weight, target, linear_bias, weight)
    dtype = _compute_dtype(input, linear_weight)
    classes, rows = len(linear_weight), target.numel()
    flat = target.reshape(-1).long()
    x = input.reshape(rows, input.shape[-1]).to(dtype)
    if is_recorded():
        logits = _logits(x, linear_weight, linear_bias, slice(None))
        weight = None if weight is None else weight.to(logits.dtype)
        loss = F.cross_entropy(logits, flat, weight, None, ignore_index, None, reduction, label_smoothing)
        return loss.view(target.shape) if reduction == "none" else loss
    valid = flat != ignore_index
    _check_target(flat, valid, classes)
    flat = torch.where(valid, flat, 0)
    scale = valid.to(arithmetic(x.dtype))
    if weight is not None:
        weight = weight.detach().to(scale.dtype)
        scale = scale * weight[flat]
    loss = apply(
        _LinearCrossEntropy,
        x,
        linear_weight,
        linear_bias,
        weight,
        flat,
        (1 - label_smoothing) * scale,
        valid.to(scale.dtype) * (label_smoothing / classes) if label_smoothing else None,
        chunk_size or max(MIN_CHUNK, CHUNK_ELEMENTS // max(rows, 1)),
    )
    if reduction == "none":
        return loss.view(target.shape)
    return loss.sum() / scale.sum() if reduction == "mean" else loss.sum()
