"""The codes in which saved tensors are stored: 8-bit ones for what needs a gradient, exact ones for what does not."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from .. import _ops
from ..fewbit.levels import Levels, hardtanh_levels
from ..quant.codec import LARGEST_MARKED_SCALE
from ..quant.layout import FLOATS, is_dense

BLOCK_SIZE = 128


class Layout(NamedTuple):
    """Of the tensor that was encoded."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Encoded(NamedTuple):
    """data: the tensors that stand for one. coarse: whether most of a block's values are lost beside its largest."""

    data: tuple[Tensor, ...]
    coarse: bool = False


class Codec(NamedTuple):
    """encode: what stands for a tensor, or None if it cannot; decode: back from the tensors, in a dtype."""

    name: str
    lossy: bool
    encode: Callable[[Tensor], Encoded | None]
    decode: Callable[[Sequence[Tensor], Layout, torch.dtype], Tensor]
    block_size: int = BLOCK_SIZE


def dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() or is_dense(x.shape, x.stride()) else torch.empty_like(x).copy_(x)


LARGEST_SHARE = 0.7
"""Of the norm of the blocks' largest values in that of all: .25 for a normal distribution, .7 at half of the energy."""
_LOST = 2  # codes up to here are off by 20 % or more


def is_coarse(x: Tensor, codes: Tensor, block_size: int) -> bool:
    """Whether in some block more than half of the values other than 0 are lost beside its largest."""
    flat, codes = (each.as_strided((each.numel(),), (1,)) for each in (x, codes))
    there = flat != 0
    lost = there & ((codes if codes.dtype == torch.uint8 else codes.abs()) <= _LOST)
    rest = -len(flat) % block_size
    lost, there = (F.pad(each, (0, rest)).view(-1, block_size).sum(1) for each in (lost, there))
    return bool((2 * lost > there).any())


def encode_power(signed: bool, x: Tensor, block_size: int = BLOCK_SIZE) -> Encoded | None:
    """None for a NaN or inf, on the CPU; on a device, which asking would wait for, their blocks are decoded to NaN."""
    x = dense(x)
    if not x.is_cpu or isinstance(x, FakeTensor):
        return Encoded(_ops.quantize_blockwise(x, "power", signed, block_size, None, mark_nonfinite=True))
    codes, scale, norms = _ops.quantize_with_norms(x, signed, block_size)  # marks take a third of the codes' time
    norm, largest = norms.tolist()
    if norm <= LARGEST_MARKED_SCALE:  # as is no NaN, and then each value and scale is
        return Encoded((codes, scale), largest > LARGEST_SHARE * norm and is_coarse(x, codes, block_size))
    if not x.isfinite().all():
        return None
    scale.clamp_max_(LARGEST_MARKED_SCALE)  # squares that overflow, as of a mask of finfo.min
    return Encoded((codes, scale), is_coarse(x, codes, block_size))


def decode_power(data: Sequence[Tensor], layout: Layout, dtype: torch.dtype, block_size: int = BLOCK_SIZE) -> Tensor:
    return _ops.dequantize_blockwise(data[0], data[1], "power", block_size, dtype)


POWER = Codec("power", True, functools.partial(encode_power, True), decode_power)
UNSIGNED = Codec("unsigned power", True, functools.partial(encode_power, False), decode_power)
SMALLEST_BLOCK = 8


@functools.cache
def in_blocks_of(codec: Codec, block_size: int) -> Codec:
    """POWER or UNSIGNED with blocks of another size."""
    encode = functools.partial(encode_power, codec is POWER, block_size=block_size)
    decode = functools.partial(decode_power, block_size=block_size)
    return Codec(codec.name, True, encode, decode, block_size)


def normalized(mean: Tensor, inverse: Tensor | None) -> Codec:
    """Codes of (x - mean) * inverse, both of which broadcast over x: small deviations from a large mean stay."""

    def encode(x: Tensor) -> Encoded | None:
        y = x.float() - mean
        found = encode_power(True, y if inverse is None else y.mul_(inverse))
        return None if found is None else Encoded((*found.data, mean), found.coarse)

    def decode(data: Sequence[Tensor], layout: Layout, dtype: torch.dtype) -> Tensor:
        y = decode_power(data[:2], layout, torch.float32)
        return (y if inverse is None else y.div_(inverse)).add_(data[2]).to(dtype)

    return Codec("normalized", True, encode, decode)


_SAMPLE = 256
_LEAST = -torch.finfo(torch.float32).max


def _only(x: Tensor, low: Tensor, high: Tensor) -> bool:
    return bool(((x == low) | (x == high)).all())


def _encode_constant(x: Tensor) -> Encoded | None:
    """Exact codes where no gradient is needed: two values (dropout, attention masks) in bits, integers in fewer bytes.

    On the CPU only: elsewhere the question would wait for the device, and dropout masks are boolean anyway.
    """
    if x.device.type != "cpu" or isinstance(x, FakeTensor) or not is_dense(x.shape, x.stride()):
        return None
    flat = x.as_strided((x.numel(),), (1,))
    if x.dtype == torch.int64:
        low, high = flat.aminmax()
        narrow = next((d for d in (torch.uint8, torch.int16, torch.int32) if _fits(low, high, d)), None)
        return None if narrow is None else Encoded((flat.to(narrow),))
    if x.dtype not in FLOATS:
        return None
    low, high = flat[:_SAMPLE].aminmax()
    threshold = max(float(low), _LEAST)
    if not high > threshold and low != high:
        return None
    if not (_only(flat[:_SAMPLE], low, high) and _only(flat, low, high)):
        return None
    codes = _ops.few_bit_encode(flat, Levels(1, (), (threshold,), (1,)))
    return Encoded((codes, torch.stack((low, high)).float()))


def _fits(low: Tensor, high: Tensor, dtype: torch.dtype) -> bool:
    limits = torch.iinfo(dtype)
    return limits.min <= int(low) and int(high) <= limits.max


def _decode_constant(data: Sequence[Tensor], layout: Layout, dtype: torch.dtype) -> Tensor:
    if len(data) == 1:
        return data[0].to(layout.dtype).as_strided(layout.shape, layout.stride)
    return _values_of_bits(data[0], data[1].tolist(), layout)


def _values_of_bits(bits: Tensor, values: Sequence[float], layout: Layout) -> Tensor:
    ones = torch.ones(layout.shape.numel(), dtype=layout.dtype, device=bits.device)
    return _ops.few_bit_backward(ones, bits, values).as_strided(layout.shape, layout.stride)


def _of_bits(name: str, levels: Levels, values: Sequence[float]) -> Codec:
    """One or two bits per element, which stand for values."""
    return Codec(
        name,
        False,
        lambda x: Encoded((_ops.few_bit_encode(dense(x), levels),)),
        lambda data, layout, dtype: _values_of_bits(data[0], values, layout),
    )


def inside(low: float, high: float, dtype: torch.dtype) -> Codec | None:
    """Whether low < x < high, in one bit: decoded to a value between them or to one of them.

    None where there is no value between them in the dtype.
    """
    between = torch.tensor((max(low, -1e30) + min(high, 1e30)) / 2, dtype=dtype).item()
    outside = torch.tensor(high if math.isfinite(high) else low, dtype=dtype).item()
    if not low < between < high or low < outside < high:
        return None
    return _of_bits("inside", hardtanh_levels(low, high), (outside, between))


def sides(low: float, high: float) -> Codec:
    """Two bits, exact: decoded to -1 for x <= low, 1 for x >= high and 0 between them."""
    below_high = torch.nextafter(torch.tensor(high), torch.tensor(low)).item()
    return _of_bits("sides", Levels(2, (), (low, below_high), (1, 2)), (-1.0, 0.0, 0.0, 1.0))


def to_side(low: float, high: float, x: Tensor, side: Tensor) -> Tensor:
    """x, moved back to the side of the limits on which it was before it was coded."""
    limits = torch.tensor((low, high), dtype=x.dtype)
    first, last = torch.nextafter(limits, limits.flip(0)).tolist()
    outside = torch.where(side < 0, x.clamp(max=low), x.clamp(min=high))
    return torch.where(side == 0, x.clamp(first, last), outside)


CONSTANT = Codec("constant", False, _encode_constant, _decode_constant)
