"""Data that plain codes would not serve, told by the statistics that norms and attention save anyway.

Inputs of norms whose mean is large beside their deviation: what is coded there is the difference from the mean.
Attention whose scores are so large that an error in them, of a share of their size, is one of its own size in the
probabilities: queries, keys, values and output stay exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .values import Value, saved_by

_STATISTICS = {  # mean and inverse deviation, by the node's attributes
    "NativeLayerNormBackward0": ("_saved_result1", "_saved_result2"),
    "NativeGroupNormBackward0": ("_saved_result1", "_saved_result2"),
    "NativeBatchNormBackward0": ("_saved_result1", "_saved_result2"),
    "CudnnBatchNormBackward0": ("_saved_result1", "_saved_result2"),
    "MiopenBatchNormBackward0": ("_saved_result1", "_saved_result2"),
}
_RUNNING = ("_saved_running_mean", "_saved_running_var")
LARGEST = 1.0
"""Of |mean| / deviation. Codes are right to a share of the largest value, which is then 4 deviations or less."""


def _of(value: Value) -> Tensor:
    return value.tensor(_of)


def _read(node: Any, name: str) -> tuple[Tensor, Tensor] | None:
    found = [saved_by(node, attribute) for attribute in _STATISTICS[name]]
    if all(found) and _of(found[0][0]).numel():  # type: ignore[index]
        return _of(found[0][0]), _of(found[1][0])  # type: ignore[index]
    running = [saved_by(node, attribute) for attribute in _RUNNING] if "BatchNorm" in name else []
    if not running or not all(running):
        return None
    return _of(running[0][0]), (_of(running[1][0]) + 1e-5).rsqrt()  # type: ignore[index]


def centre(node: Any, x: Tensor) -> Tensor | None:
    """What to subtract from a norm's input before it is coded, to broadcast over ``x``; None for nothing.

    0 for the rows (groups, channels) whose mean is at most LARGEST deviations. On a CPU None where that is all of them;
    elsewhere asking would wait for the device.
    """
    name = node.name()
    if name not in _STATISTICS or isinstance(x, FakeTensor):
        return None
    statistics = _read(node, name)
    if statistics is None:
        return None
    mean, inverse = (each.float() for each in statistics)
    off = mean.abs() * inverse > LARGEST
    if x.device.type == "cpu" and not off.any():
        return None
    return _broadcast(torch.where(off, mean, 0.0), name, x)


def _broadcast(mean: Tensor, name: str, x: Tensor) -> Tensor:
    if name == "NativeLayerNormBackward0":
        return mean
    rest = (1,) * (x.dim() - 2)
    if name == "NativeGroupNormBackward0":
        mean = mean.reshape(x.shape[0], -1)
        return mean.repeat_interleave(x.shape[1] // mean.shape[1], 1).view(*x.shape[:2], *rest)
    return mean.view(1, -1, *rest)


_LOG_SUMS = {
    "ScaledDotProductFlashAttentionForCpuBackward0": "_saved_logsumexp",
    "ScaledDotProductFlashAttentionBackward0": "_saved_logsumexp",
    "ScaledDotProductEfficientAttentionBackward0": "_saved_log_sumexp",
    "ScaledDotProductCudnnAttentionBackward0": "_saved_logsumexp",
}
LARGEST_SCORE = 100.0
_SATURATED = "memkern saturated"


def saturated(node: Any) -> bool:
    """Whether attention's scores exceed LARGEST_SCORE. On a CPU only: elsewhere asking would wait for the device."""
    attribute = _LOG_SUMS.get(node.name())
    if attribute is None or node._input_metadata[0].device.type != "cpu":
        return False
    known = node.metadata.get(_SATURATED)
    if known is None:
        found = saved_by(node, attribute)
        sums = _of(found[0]) if found else None
        known = (
            sums is not None and not isinstance(sums, FakeTensor) and bool(_finite_max(sums) > LARGEST_SCORE)
        )
        node.metadata[_SATURATED] = known
    return known


def _finite_max(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0).abs().amax()  # rows of nothing but masks have -inf
