"""Bytes that operators allocate and free inside, where they are more than the margin of predictions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}
CHANNELS = 16  # of oneDNN's blocked layouts


def scratch_bytes(func: Any, args: Any, out: Any) -> int:
    """At most, on the CPU: a convolution's input, weight and output (or its gradient) once more in oneDNN's layouts.

    There the input channels are a multiple of 16, and half precision is fp32 in the backward pass
    (lab/tests/test_plan_scratch.py measures it). Where oneDNN has no bf16, as without AVX-512, torch makes a matrix of
    the windows of all outputs.
    """
    if func not in CONVOLUTIONS or args[0].device.type != "cpu":
        return 0
    x, weight = args[:2] if func is aten.convolution.default else args[1:3]
    last: Tensor = out if func is aten.convolution.default else args[0]
    elements = last.numel() + sum(t.numel() // t.shape[1] * _blocked(t.shape[1]) for t in (x, weight))
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        windows = last.numel() // last.shape[1] * (weight.numel() // weight.shape[0])
        return max(4 * elements, weight.element_size() * windows)
    return 4 * elements


def _blocked(channels: int) -> int:
    return -(-channels // CHANNELS) * CHANNELS
