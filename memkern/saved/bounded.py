"""Codes of results between two limits, such as sigmoid's: of the distance from the nearer limit.

The derivative is made of that distance: ``y (1 - y)`` of sigmoid, ``1 - y ** 2`` of tanh, ``p - 1`` at the target of a
cross entropy. Codes of y itself are off by a share of y, which near a limit is many times the distance. So one or two
bits tell which limit is the nearer one, and what is coded is the square root of the distance d in blocks with the
largest d of s, by the unsigned power code::

    d = (s ** .5 * (q / 255) ** 2) ** 2        off by .0045 * (s / d) ** .25 of d in root mean square

That is .5 % of a block's largest distance, 2.5 % of one a thousandth of it, and .6 % of the norm of all distances of a
block at most. The square root gives the units of a layer that are saturated and those that are not one block of codes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _ops
from ..alike import few
from ..fewbit.levels import Levels
from .codecs import Codec, Encoded, Layout, decode_power, dense, encode_power

MOST_NEGATIVE = -100.0
"""Of log-probabilities: exp of it is 0 in fp32, as of what a mask has left out."""
_PIECE, _PIECE_ON_DEVICE = 1 << 18, 1 << 24


class Limits(NamedTuple):
    """How results and distances follow from one another.

    root: of results, the square roots of their distances. sides: the bits of each result that tell its nearer limit.
    result: from roots and bits.
    """

    root: Callable[[Tensor], Tensor]
    sides: Levels
    result: Callable[[Tensor, Tensor], Tensor]


def _piece(x: Tensor) -> int:
    return _PIECE if x.device.type == "cpu" else _PIECE_ON_DEVICE


def _pieces(x: Tensor) -> Iterator[slice]:
    """In memory order. What is computed in between needs the memory of a piece."""
    size = _piece(x)
    return (slice(start, start + size) for start in few(range(0, x.numel(), size), x))


def _flat(x: Tensor) -> Tensor:
    return x.as_strided((x.numel(),), (1,))


def _encode(limits: Limits, x: Tensor) -> Encoded | None:
    x = dense(x)
    root = torch.empty_like(x, dtype=torch.float32)
    source, target = _flat(x), _flat(root)
    for piece in _pieces(x):
        target[piece] = limits.root(source[piece].float())
    found = encode_power(False, root)
    if found is None:
        return None
    return Encoded((*found.data, _ops.few_bit_encode(x, limits.sides)), found.coarse)


def _decode(limits: Limits, data: Sequence[Tensor], layout: Layout, dtype: torch.dtype) -> Tensor:
    root = decode_power(data[:2], layout, torch.float32)
    result = root if dtype == torch.float32 else torch.empty_like(root, dtype=dtype)
    source, target = _flat(root), _flat(result)
    for piece in _pieces(root):
        bits = data[2][:, piece.start // 8 : piece.stop // 8]  # of planes of bits
        target[piece] = limits.result(source[piece], bits.contiguous())
    return result


def _codec(name: str, limits: Limits) -> Codec:
    return Codec(name, True, functools.partial(_encode, limits), functools.partial(_decode, limits))


def _root(y: Tensor) -> Tensor:
    """Of min(|y|, 1 - |y|); a softmax may exceed 1 by rounding."""
    y = y.abs()
    return torch.minimum(y, 1 - y).clamp_min_(0).sqrt_()


def _result(limit: Sequence[float], sign: Sequence[float]) -> Callable[[Tensor, Tensor], Tensor]:
    """limit + sign * distance, both by the bits."""

    def result(root: Tensor, bits: Tensor) -> Tensor:
        distance = _ops.few_bit_backward(root * root, bits, sign)
        return distance.add_(_ops.few_bit_backward(torch.ones_like(root), bits, limit))

    return result


def _log_root(logarithm: Tensor) -> Tensor:
    p = logarithm.expm1().neg_()
    return torch.where(logarithm > _HALF, p.clamp_min_(0).sqrt_(), logarithm.mul(0.5).exp_())


def _logarithm(root: Tensor, bits: Tensor) -> Tensor:
    below = _ops.few_bit_backward(root, bits, (1.0, -1.0))  # -root where the nearer limit is 1
    result = torch.where(below.signbit(), torch.log1p(-root * root), 2 * root.log())
    return result.clamp_min_(MOST_NEGATIVE)


_HALF = math.log(0.5)
# Gray codes: 0 and 1 for [0, 1]; for [-1, 1] from below 0, 1, 3, 2.
LIMITS = {
    "probability": Limits(_root, Levels(1, (), (0.5,), (1,)), _result((0.0, 1.0), (1.0, -1.0))),
    "tanh": Limits(
        _root,
        Levels(2, (), (-0.5, 0.0, 0.5), (1, 2, 1)),
        _result((-1.0, 0.0, 1.0, 0.0), (1.0, -1.0, -1.0, 1.0)),
    ),
    "log-probability": Limits(_log_root, Levels(1, (), (_HALF,), (1,)), _logarithm),
}
CODECS = tuple(_codec(name, limits) for name, limits in LIMITS.items())
PROBABILITY, TANH, LOGARITHM = CODECS
