"""The codes in which saved tensors are stored: 8-bit ones for what needs a gradient, exact ones for what does not."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .. import _ops
from ..fewbit.levels import Levels
from ..quant.layout import FLOATS, is_dense

BLOCK_SIZE = 128
LARGEST_SCALE = 3.3e38
"""Decoding rounds: from a scale of finfo.max, as of a mask, it would come to infinity."""


class Layout(NamedTuple):
    """Of the tensor that was encoded."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Codec(NamedTuple):
    """encode: the tensors that stand for one, or None if it cannot; decode: back from them, in a dtype."""

    name: str
    lossy: bool
    encode: Callable[[Tensor], tuple[Tensor, ...] | None]
    decode: Callable[[Sequence[Tensor], Layout, torch.dtype], Tensor]


def _dense(x: Tensor) -> Tensor:
    return x if is_dense(x.shape, x.stride()) else torch.empty_like(x).copy_(x)


def _finite_or_marked(x: Tensor, scale: Tensor) -> Tensor | None:
    """The scale, or None where x has a NaN or inf; NaN on devices where asking would wait."""
    if isinstance(x, FakeTensor):
        return scale
    if x.device.type == "cpu" and math.isfinite(x.sum(dtype=torch.float32).item()):
        return scale
    low, high = x.aminmax()  # a sum may overflow, as of a mask of finfo.min; both of these carry NaN on
    marks = (low - low + (high - high)).float()
    if x.device.type == "cpu":
        return scale if marks.item() == 0 else None
    return scale + marks


def _encode_power(signed: bool, x: Tensor) -> tuple[Tensor, ...] | None:
    x = _dense(x)
    codes, scale = _ops.quantize_blockwise(x, "power", signed, BLOCK_SIZE, None)
    marked = _finite_or_marked(x, scale.clamp_max_(LARGEST_SCALE))
    return None if marked is None else (codes, marked)


def _decode_power(data: Sequence[Tensor], layout: Layout, dtype: torch.dtype) -> Tensor:
    return _ops.dequantize_blockwise(data[0], data[1], "power", BLOCK_SIZE, dtype)


POWER = Codec("power", True, functools.partial(_encode_power, True), _decode_power)
UNSIGNED = Codec("unsigned power", True, functools.partial(_encode_power, False), _decode_power)

MOST_NEGATIVE = -20.0
"""Of log-probabilities: exp of it is 2e-9, and what is smaller, such as what a mask has left out, adds no more."""


def _encode_logarithm(x: Tensor) -> tuple[Tensor, ...] | None:
    return _encode_power(False, x.clamp_min(MOST_NEGATIVE).neg_())


def _decode_logarithm(data: Sequence[Tensor], layout: Layout, dtype: torch.dtype) -> Tensor:
    return _decode_power(data, layout, dtype).neg_()


LOGARITHM = Codec("log-probability", True, _encode_logarithm, _decode_logarithm)


def centred(centre: Tensor) -> Codec:
    """Codes of x - centre, which broadcasts over x: where a norm's mean is large, its deviations keep their digits."""

    def encode(x: Tensor) -> tuple[Tensor, ...] | None:
        data = _encode_power(True, x.float() - centre)
        return None if data is None else (*data, centre)

    def decode(data: Sequence[Tensor], layout: Layout, dtype: torch.dtype) -> Tensor:
        return (_decode_power(data[:2], layout, torch.float32) + data[2]).to(dtype)

    return Codec("centred", True, encode, decode)


_SAMPLE = 256
_LEAST = -torch.finfo(torch.float32).max


def _only(x: Tensor, low: Tensor, high: Tensor) -> bool:
    return bool(((x == low) | (x == high)).all())


def _encode_constant(x: Tensor) -> tuple[Tensor, ...] | None:
    """What needs no gradient, exactly: two values (dropout and attention masks) in bits, integers in fewer bytes.

    On the CPU only: elsewhere the question would wait for the device, and dropout masks are boolean anyway.
    """
    if x.device.type != "cpu" or isinstance(x, FakeTensor) or not is_dense(x.shape, x.stride()):
        return None
    flat = x.as_strided((x.numel(),), (1,))
    if x.dtype == torch.int64:
        low, high = flat.aminmax()
        narrow = next((d for d in (torch.uint8, torch.int16, torch.int32) if _fits(low, high, d)), None)
        return None if narrow is None else (flat.to(narrow),)
    if x.dtype not in FLOATS:
        return None
    low, high = flat[:_SAMPLE].aminmax()
    threshold = max(float(low), _LEAST)
    if not high > threshold and low != high:
        return None
    if not (_only(flat[:_SAMPLE], low, high) and _only(flat, low, high)):
        return None
    codes = _ops.few_bit_encode(flat, Levels(1, (), (threshold,), (1,)))
    return codes, torch.stack((low, high)).float()


def _fits(low: Tensor, high: Tensor, dtype: torch.dtype) -> bool:
    limits = torch.iinfo(dtype)
    return limits.min <= int(low) and int(high) <= limits.max


def _decode_constant(data: Sequence[Tensor], layout: Layout, dtype: torch.dtype) -> Tensor:
    if len(data) == 1:
        flat = data[0].to(layout.dtype)
    else:
        ones = torch.ones(layout.shape.numel(), dtype=layout.dtype, device=data[0].device)
        flat = _ops.few_bit_backward(ones, data[0], data[1].tolist())
    return flat.as_strided(layout.shape, layout.stride)


CONSTANT = Codec("constant", False, _encode_constant, _decode_constant)
CODECS = {codec.name: codec for codec in (POWER, UNSIGNED, LOGARITHM)}
