"""How a step reads and writes a parameter: the formulas of ``memkern.quant.codec.WEIGHTS``.

Mirror: ``csrc/core/weights.h``.

PARAM_DTYPE of a kernel is the parameter's number in quant.layout.FLOATS, or that of a bf16 parameter which is not just
rounded to the nearest: one of the three below.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..quant import codec as C
from . import step_table as st
from .tile import load_floats, pointer, store_floats

_BF16 = tl.constexpr(1)
_LAST_FLOAT = tl.constexpr(2)
STOCHASTIC = tl.constexpr(_LAST_FLOAT.value + C.WEIGHTS["stochastic"])
ERROR8 = tl.constexpr(_LAST_FLOAT.value + C.WEIGHTS["bf16+8"])
ERROR16 = tl.constexpr(_LAST_FLOAT.value + C.WEIGHTS["bf16+16"])
_DROPPED8 = tl.constexpr(C.WEIGHT_DROPPED_BITS["bf16+8"])
_DROPPED_STOCHASTIC = tl.constexpr(C.WEIGHT_DROPPED_BITS["stochastic"])
_KEPT8 = tl.constexpr(-(1 << C.WEIGHT_DROPPED_BITS["bf16+8"]))
_KEPT_STOCHASTIC = tl.constexpr(-(1 << C.WEIGHT_DROPPED_BITS["stochastic"]))
_J = tl.constexpr(C.WEIGHT_J)
_INF = tl.constexpr(float("inf"))


def param_dtype(dtype: int, weight_storage: int) -> int:
    """PARAM_DTYPE of a parameter whose dtype is quant.layout.FLOATS[dtype]."""
    return _LAST_FLOAT.value + weight_storage if weight_storage else dtype


@triton.jit
def state_pointer(address, start, PARAM_DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    if PARAM_DTYPE == ERROR16:
        return pointer(address, start, tl.int16, VECTOR)
    else:
        return pointer(address, start, tl.int8, VECTOR)


@triton.jit
def load_weights(address, state, tile, PARAM_DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """Loads a tile of a parameter and of its weight state (0 where it has none), unconverted."""
    if PARAM_DTYPE <= _LAST_FLOAT:
        return load_floats(address, tile, PARAM_DTYPE, VECTOR), 0
    elif PARAM_DTYPE == STOCHASTIC:
        return load_floats(address, tile, _BF16, VECTOR), 0
    else:
        start, offset, mask, _, _ = tile
        at = state_pointer(state, start, PARAM_DTYPE, VECTOR) + offset
        return load_floats(address, tile, _BF16, VECTOR), tl.load(at, mask=mask, other=0)


@triton.jit
def join_weights(p, state, PARAM_DTYPE: tl.constexpr):
    """The weights in fp32, from what :func:`load_weights` returns.

    An error that no step left beside p must not make a NaN of it: p itself then.
    """
    x = p.to(tl.float32)
    if PARAM_DTYPE == ERROR16 or PARAM_DTYPE == ERROR8:  # noqa: SIM109 (Triton has no `in`)
        error = state.to(tl.int32) << (_DROPPED8 if PARAM_DTYPE == ERROR8 else 0)
        joined = (x.to(tl.int32, bitcast=True) + error).to(tl.float32, bitcast=True)
        return tl.where(joined == joined, joined, x)
    else:
        return x


@triton.jit
def random_of(s, BLOCK_SIZE: tl.constexpr, PARAM_DTYPE: tl.constexpr):
    """The random bits of a tensor's step for each position of a block, (1, BLOCK_SIZE); ``s``: its scalars."""
    if PARAM_DTYPE == STOCHASTIC or PARAM_DTYPE == ERROR8:  # noqa: SIM109
        offset = tl.load(s + st.WEIGHT_OFFSET).to(tl.uint32, bitcast=True)
        bits = tl.arange(0, BLOCK_SIZE).to(tl.uint32) * _J + offset
        shift: tl.constexpr = 32 - (_DROPPED8 if PARAM_DTYPE == ERROR8 else _DROPPED_STOCHASTIC)
        return (bits >> shift).to(tl.int32)[None, :]
    else:
        return 0


@triton.jit
def store_weights(x, address, state, r, tile, PARAM_DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """Stores a tile of weights and of their state; ``r``: :func:`random_of`."""
    start, offset, mask, _, _ = tile
    if PARAM_DTYPE <= _LAST_FLOAT:
        store_floats(x, address, tile, PARAM_DTYPE, VECTOR)
    else:
        dropped: tl.constexpr = (
            _DROPPED_STOCHASTIC if PARAM_DTYPE == STOCHASTIC else (_DROPPED8 if PARAM_DTYPE == ERROR8 else 0)
        )
        finite = tl.abs(x) < _INF
        kept_bits: tl.constexpr = (
            _KEPT_STOCHASTIC if PARAM_DTYPE == STOCHASTIC else (_KEPT8 if PARAM_DTYPE == ERROR8 else -1)
        )
        u = (x.to(tl.int32, bitcast=True) + r) & kept_bits
        p = (u + 0x8000) & -0x10000
        store_floats(tl.where(finite, p.to(tl.float32, bitcast=True), x), address, tile, _BF16, VECTOR)
        if PARAM_DTYPE != STOCHASTIC:
            at = state_pointer(state, start, PARAM_DTYPE, VECTOR) + offset
            error = tl.where(finite, (u - p) >> dropped, 0)
            tl.store(at, error.to(at.dtype.element_ty), mask=mask)
