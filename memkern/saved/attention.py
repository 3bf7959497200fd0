"""Attention's output and log-sum-exp, computed again in the backward pass from the decoded queries, keys and values.

The gradient of the scores is ``P * (dO V^T - rowsum(dO * O))`` with ``P = exp(Q K^T * scale - logsumexp)``. Where a
query is sure of one key, both factors are small differences. If O and logsumexp are those of the exact Q, K and V and
P is of decoded ones, the differences are the codes' errors. All of them from the same decoded tensors give the exact
gradient at a nearby point instead: it is off by a share of itself, which is the error of a score.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .. import _ops
from ..functions.autograd import without_autocast
from ..quant.layout import FLOATS
from .peek import packed_by, saved_by
from .saved_value import Value
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
    return _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Any:
    return _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)


def _efficient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Any:
    return _ATEN._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, causal, scale=scale)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Any:
    return _ATEN._scaled_dot_product_cudnn_attention(q, k, v, mask, True, 0.0, causal, False, scale=scale)


FORWARD = {
    "ScaledDotProductFlashAttentionForCpuBackward0": _Forward("_saved_logsumexp", "_saved_attn_mask", _on_cpu),
    "ScaledDotProductFlashAttentionBackward0": _Forward("_saved_logsumexp", None, _flash),
    "ScaledDotProductEfficientAttentionBackward0": _Forward("_saved_log_sumexp", "_saved_attn_bias", _efficient),
    "ScaledDotProductCudnnAttentionBackward0": _Forward("_saved_logsumexp", "_saved_attn_bias", _cudnn),
}
_INPUTS = ("_saved_query", "_saved_key", "_saved_value")
LARGEST_SCORE_DEVIATION = 2.2
"""Of ``|q| |k| scale / d ** .5``, root mean squares over the rows: the deviation of scores of unrelated q and k.

Codes are off by .7 % of a normal distribution's deviation, so the difference of two scores by .0068 * 2 of this, and
the gradient by as much of itself: 3 % at 2.2.
"""
LARGEST_SURENESS = 1.5
"""Of what an error of 1 in each score is to the gradient of the scores, in norms; 1 for equal probabilities.

Output and log-sum-exp of the exact tensors put the codes' errors, .7 to 1 %, into the gradient so many times.
"""
SAMPLE = 16  # queries of each head
_FOUND = "memkern scores"


class _Scores(NamedTuple):
    """large: too large for codes of queries and keys. sure: the forward pass is to run again."""

    large: bool
    sure: bool


def is_attention(node: Any) -> bool:
    return operation(node) in FORWARD


def stays_exact(node: Any, waiting: Value | None) -> bool:
    """Whether codes would be too coarse for what attention has saved in ``waiting``.

    They are for queries and keys with large scores, and with dropout, as a second forward pass draws another mask.
    """
    if not is_attention(node):
        return False
    if node._saved_dropout_p > 0:
        return True
    return any(waiting in (saved_by(node, name) or ()) for name in _INPUTS[:2]) and _scores(node).large


def runs_again(node: Any, waiting: Value) -> bool:
    """Whether a waiting tensor is attention's output, to be computed again."""
    return (
        is_attention(node)
        and node._saved_dropout_p == 0
        and waiting in (saved_by(node, "_saved_output") or ())
        and _scores(node).sure
    )


def _scores(node: Any) -> _Scores:
    known = node.metadata.get(_FOUND)
    if known is None:
        node.metadata[_FOUND] = known = _look(node)
    return known


def _look(node: Any) -> _Scores:
    """Elsewhere than on a CPU asking would wait for the device: there every forward pass runs again."""
    saved = [saved_by(node, name) for name in _INPUTS[:2]]
    if node._input_metadata[0].device.type != "cpu" or not all(saved):
        return _Scores(False, True)
    query, key = (each[0].tensor(_of) for each in saved)  # type: ignore[index]
    if isinstance(query, FakeTensor) or isinstance(key, FakeTensor) or not query.numel() or not key.numel():
        return _Scores(False, False)  # as of a model before training
    width = query.shape[-1]
    scale = width**-0.5 if node._saved_scale is None else float(node._saved_scale)
    masks = None
    if not node._saved_is_causal and (name := FORWARD[operation(node)].mask):
        masks = saved_by(node, name)
    mask = _in_an_ops_dtype(masks[0].tensor(_of)) if masks else None
    given = _in_an_ops_dtype(query), _in_an_ops_dtype(key)
    found = _ops.attention_statistics(*given, mask, node._saved_is_causal, scale, SAMPLE).tolist()
    deviations = (sum_ / (x.numel() / width) for sum_, x in zip(found, (query, key), strict=False))
    large = not math.sqrt(math.prod(deviations)) * abs(scale) / width**0.5 <= LARGEST_SCORE_DEVIATION
    return _Scores(large, large or not found[2] <= LARGEST_SURENESS**2 * found[3])


def _in_an_ops_dtype(x: Tensor) -> Tensor:
    return x if x.dtype in (*FLOATS, torch.bool) else x.float()


def _of(value: Value) -> Tensor:
    return value.tensor(_of)


class _Run:
    """A forward pass from what a node has saved, for two results that the node asks for one after the other."""

    def __init__(self, node: Any) -> None:
        forward = FORWARD[operation(node)]
        self.function = forward.run
        self.causal, self.scale = node._saved_is_causal, node._saved_scale
        names = (*_INPUTS, forward.mask) if forward.mask else _INPUTS
        packed = [found[0] for name in names if (found := packed_by(node, name))]
        self.inputs = [(each.value, each.fitted) for each in packed]
        for value, _ in self.inputs:
            value.uses += 1
        self.left: dict[int, Tensor] = {}

    def result(self, nr: int, of: Callable[[Value], Tensor]) -> Tensor:
        """The output (0) or the log-sum-exp (1). The other one is held until it is asked for."""
        if (found := self.left.pop(nr, None)) is not None:
            return found
        results = self._results(of)
        self.left[1 - nr] = results[1 - nr]
        return results[nr]

    def _results(self, of: Callable[[Value], Tensor]) -> tuple[Tensor, Tensor]:
        q, k, v, *mask = (fitted(of(value)) for value, fitted in self.inputs)
        with torch.no_grad(), without_autocast(q.device):
            output, logsumexp, *_ = self.function(q, k, v, mask[0] if mask else None, self.causal, self.scale)
        return output, logsumexp


class Result(Value):
    """The output, or the log-sum-exp, of a forward pass that runs again."""

    lossy = True

    def __init__(self, run: _Run, nr: int, dtype: torch.dtype) -> None:
        self.run, self.nr, self.dtype, self.precision = run, nr, dtype, dtype

    def fresh(self) -> bool:
        return all(value.fresh() for value, _ in self.run.inputs)

    def tensor(self, of: Callable[[Value], Tensor]) -> Tensor:
        return self.run.result(self.nr, of)


def run_again(node: Any) -> Value:
    """The value of the output. The node's log-sum-exp is replaced as well."""
    run = _Run(node)
    for packed in packed_by(node, FORWARD[operation(node)].logsumexp):
        packed.value = Result(run, 1, packed.dtype)
    return Result(run, 0, node._input_metadata[0].dtype)
