"""What attention's queries and keys tell of its scores and probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from ..quant.layout import FLOATS


def attention_statistics(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float, sample: int
) -> Tensor:
    """float64: sums of squares of ``query`` and of ``key``, and of the probabilities p of at most ``sample`` queries of
    each head, evenly over the sequence: of ``p^2`` and of ``p^2 (1 - 2p + sum of p^2 over the keys)``.

    The last two are the norms of the derivative of the probabilities times their norm: how an error of 1 in each score
    compares with the gradient of the scores. query, key: (batch, heads, tokens, width); heads of the query may share
    keys. mask: boolean, True for what is seen, or added to the scores.
    """
    _check(query, key, mask, sample)
    p = _probabilities(query, key, mask, is_causal, scale, sample)
    squares = p.square().sum(-1, keepdim=True)
    gradient = p.square().mul(1 - 2 * p + squares)
    sums = (query.double().square(), key.double().square(), squares, gradient)
    return torch.stack([each.sum(dtype=torch.float64) for each in sums])


def _check(query: Tensor, key: Tensor, mask: Tensor | None, sample: int) -> None:
    shapes = f"got {tuple(query.shape)} and {tuple(key.shape)}"
    if query.dim() != 4 or key.dim() != 4:
        raise ValueError(f"query and key must be of shape (batch, heads, tokens, width), {shapes}")
    if query.dtype not in FLOATS or query.dtype != key.dtype:
        raise TypeError(f"query and key must both be float32, bfloat16 or float16, got {query.dtype} and {key.dtype}")
    same = query.shape[0] == key.shape[0] and query.shape[3] == key.shape[3]
    if not same or not key.shape[1] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"query and key must agree in batch and width, and query's heads be a multiple of key's, {shapes}"
        )
    if sample < 1:
        raise ValueError(f"sample must be positive, got {sample}")
    if mask is not None and mask.dim() > 4:
        raise ValueError(f"mask must have at most 4 dimensions, got {mask.dim()}")
    if mask is not None and mask.dtype not in (*FLOATS, torch.bool):
        raise TypeError(f"mask must be bool, float32, bfloat16 or float16, got {mask.dtype}")


def _probabilities(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float, sample: int
) -> Tensor:
    step = max(1, -(-query.shape[-2] // sample))
    # From the middle: the first row of a causal mask stands for itself alone.
    rows = torch.arange(step // 2, query.shape[-2], step, device=query.device)
    some = query.index_select(-2, rows).float() * scale
    # Grouped-query attention: heads share their keys.
    grouped = some.reshape(*key.shape[:2], -1, key.shape[-1])
    scores = (grouped @ key.float().transpose(-1, -2)).view(*some.shape[:-1], key.shape[-2])
    if is_causal:
        scores = scores.masked_fill(torch.arange(key.shape[-2], device=key.device) > rows[:, None], -torch.inf)
    if mask is not None:
        mask = mask.index_select(-2, rows) if mask.dim() > 1 and mask.shape[-2] > 1 else mask
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1).nan_to_num_(0.0)  # rows that see nothing
