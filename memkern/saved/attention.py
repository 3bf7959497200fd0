"""Attention's output and log-sum-exp, computed again in the backward pass from the decoded queries, keys and values.

The gradient of the scores is ``P * (dO V^T - rowsum(dO * O))`` with ``P = exp(Q K^T * scale - logsumexp)``. Where a
query is sure of one key, both factors are small differences. If O and logsumexp are those of the exact Q, K and V and
P is of decoded ones, the differences are the codes' errors. All of them from the same decoded tensors give the exact
gradient at a nearby point instead: it is off by a share of itself, which is the error of a score.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..autograd import without_autocast
from .saved_value import Value, packed_by, saved_by
from .users import operation

_ATEN = torch.ops.aten


class _Forward(NamedTuple):
    """An attention operation: the attributes of its log-sum-exp and mask, and its forward pass.

    run: (query, key, value, mask, is_causal, scale) -> (output, logsumexp, ...), without dropout.
    """

    logsumexp: str
    mask: str | None
    run: Callable[..., tuple[Tensor, ...]]


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Any:
    return _ATEN._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Any:
    return _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Any:
    return _ATEN._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, causal, scale=scale)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Any:
    return _ATEN._scaled_dot_product_cudnn_attention(q, k, v, mask, True, 0.0, causal, False, scale=scale)


_FORWARD = {
    "ScaledDotProductFlashAttentionForCpuBackward0": _Forward(
        "_saved_logsumexp", "_saved_attn_mask", _on_cpu
    ),
    "ScaledDotProductFlashAttentionBackward0": _Forward("_saved_logsumexp", None, _flash),
    "ScaledDotProductEfficientAttentionBackward0": _Forward(
        "_saved_log_sumexp", "_saved_attn_bias", _efficient
    ),
    "ScaledDotProductCudnnAttentionBackward0": _Forward("_saved_logsumexp", "_saved_attn_bias", _cudnn),
}
_INPUTS = ("_saved_query", "_saved_key", "_saved_value")
LARGEST_SCORE_DEVIATION = 2.2
"""Of ``|q| |k| scale / d ** .5``, root mean squares over the rows: the deviation of scores of unrelated q and k.

Codes are off by .7 % of a normal distribution's deviation, so the difference of two scores by .0068 * 2 of this, and
the gradient by as much of itself: 3 % at 2.2.
"""
_LARGE = "memkern large scores"


def is_attention(node: Any) -> bool:
    return operation(node) in _FORWARD


def runs_again(node: Any) -> bool:
    """Whether it is attention whose forward pass can run again: with dropout it would draw another mask."""
    return is_attention(node) and node._saved_dropout_p == 0


def stays_exact(node: Any, waiting: Value | None) -> bool:
    """Whether codes would be too coarse for what attention has saved in ``waiting``.

    They are for queries and keys with large scores, and for everything if the forward pass cannot run again.
    """
    if not is_attention(node):
        return False
    if not runs_again(node):
        return True
    if not any(waiting in (saved_by(node, name) or ()) for name in _INPUTS[:2]):
        return False
    known = node.metadata.get(_LARGE)
    if known is None:
        node.metadata[_LARGE] = known = _has_large_scores(node)
    return known


def _has_large_scores(node: Any) -> bool:
    """On a CPU only: elsewhere asking would wait for the device."""
    found = [saved_by(node, name) for name in _INPUTS[:2]]
    if node._input_metadata[0].device.type != "cpu" or not all(found):
        return False
    query, key = (each[0].tensor(_of) for each in found)  # type: ignore[index]
    if isinstance(query, FakeTensor) or isinstance(key, FakeTensor) or not query.numel() or not key.numel():
        return False
    width = query.shape[-1]
    scale = width**-0.5 if node._saved_scale is None else abs(node._saved_scale)
    return not _row_norm(query) * _row_norm(key) * scale <= LARGEST_SCORE_DEVIATION * width**0.5


def _of(value: Value) -> Tensor:
    return value.tensor(_of)


def _row_norm(x: Tensor) -> float:
    """Root mean square of the norms of rows."""
    return torch.linalg.vector_norm(x.float()).item() / (x.numel() / x.shape[-1]) ** 0.5


class _Run:
    """One forward pass from what a node has saved. The output is asked for first, the log-sum-exp after it."""

    def __init__(self, node: Any) -> None:
        forward = _FORWARD[operation(node)]
        self.function = forward.run
        self.causal, self.scale = node._saved_is_causal, node._saved_scale
        names = (*_INPUTS, forward.mask) if forward.mask else _INPUTS
        packed = [found[0] for name in names if (found := packed_by(node, name))]
        self.inputs = [(each.value, each.fitted) for each in packed]
        for value, _ in self.inputs:
            value.uses += 1
        self.logsumexp: Tensor | None = None

    def results(self, of: Callable[[Value], Tensor]) -> tuple[Tensor, Tensor]:
        q, k, v, *mask = (fitted(of(value)) for value, fitted in self.inputs)
        with torch.no_grad(), without_autocast(q.device):
            output, logsumexp, *_ = self.function(q, k, v, mask[0] if mask else None, self.causal, self.scale)
        return output, logsumexp


class Result(Value):
    """The output, or the log-sum-exp, of a forward pass that runs again."""

    lossy = True

    def __init__(self, run: _Run, dtype: torch.dtype, is_output: bool) -> None:
        self.run, self.dtype, self.precision, self.is_output = run, dtype, dtype, is_output

    def fresh(self) -> bool:
        return all(value.fresh() for value, _ in self.run.inputs)

    def tensor(self, of: Callable[[Value], Tensor]) -> Tensor:
        run = self.run
        if not self.is_output and run.logsumexp is not None:
            logsumexp, run.logsumexp = run.logsumexp, None
            return logsumexp
        output, logsumexp = run.results(of)
        if not self.is_output:
            return logsumexp
        run.logsumexp = logsumexp
        return output


def is_output(node: Any, waiting: Value) -> bool:
    """Whether a waiting tensor is the output of an attention that can run again."""
    return runs_again(node) and waiting in (saved_by(node, "_saved_output") or ())


def run_again(node: Any) -> Value:
    """The value of the output. The node's log-sum-exp is replaced as well."""
    run = _Run(node)
    dtype = node._input_metadata[0].dtype
    for packed in packed_by(node, _FORWARD[operation(node)].logsumexp):
        packed.value = Result(run, packed.dtype, is_output=False)
    return Result(run, dtype, is_output=True)
