"""Runs attention again in the backward pass, for the output and log-sum-exp of decoded queries, keys and values.

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

_ATEN = torch.ops.aten


class _Forward(NamedTuple):
    """An attention operation: the name of its mask in the backward pass, and its forward pass.

    run: (query, key, value, mask, is_causal, scale) -> (output, logsumexp, ...), without dropout.
    """

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


# By the operation's name in ATen.
FORWARD = {
    "scaled_dot_product_flash_attention_for_cpu": _Forward("attn_mask", _on_cpu),
    "scaled_dot_product_flash_attention": _Forward(None, _flash),
    "scaled_dot_product_efficient_attention": _Forward("attn_bias", _efficient),
    "scaled_dot_product_cudnn_attention": _Forward("attn_bias", _cudnn),
}
