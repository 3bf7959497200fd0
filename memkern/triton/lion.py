"""memkern::lion_step_. Order of operations: memkern/reference/lion.py."""

from __future__ import annotations

import triton
import triton.language as tl

from ..schemas import LION_STEP, StepArgs
from . import multi_tensor as mt
from .moment import decayed, load_moment, load_scale, store_moment
from .table import run_step
from .tiles import load_floats, store_floats, tile_of

# Words of a group.
_BETA1 = mt.word_of(LION_STEP, "beta1")
_BETA2 = mt.word_of(LION_STEP, "beta2")
_WEIGHT_DECAY = mt.word_of(LION_STEP, "weight_decay")
_MAXIMIZE = mt.word_of(LION_STEP, "maximize")
# A word of a tensor's scalars, beside those of multi_tensor.py.
_LR = tl.constexpr(5)


@triton.jit
def sign(x):
    """-1, 0 or 1; NaN stays NaN, and so does the sign of zero."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit(do_not_specialize=["groups", "tensors"])
def lion_prologue(table, scalars, groups, tensors):
    """Leaves each tensor's scalars (``LionScalars`` in csrc/core/lion.h) for the main kernel."""
    columns, t, mask = mt.tensors_of_program(table, groups, tensors)
    at = mt.group_of(table, columns, tensors, t, mask)
    lr = mt.read_number(at, mask)
    beta1 = mt.read_fp64(at + _BETA1, mask)
    beta2 = mt.read_fp64(at + _BETA2, mask)
    weight_decay = mt.read_fp64(at + _WEIGHT_DECAY, mask)
    maximize = mt.read_fp64(at + _MAXIMIZE, mask) != 0.0
    factor = mt.gradient_factor(table)

    out = scalars + t * mt.SCALARS
    tl.store(out + mt.GRAD_FACTOR, tl.where(maximize, -factor, factor).to(tl.float32), mask=mask)
    tl.store(out + mt.BETA1, beta1.to(tl.float32), mask=mask)
    tl.store(out + mt.ONE_MINUS_BETA1, (1.0 - beta1).to(tl.float32), mask=mask)
    tl.store(out + mt.BETA2, beta2.to(tl.float32), mask=mask)
    tl.store(out + mt.ONE_MINUS_BETA2, (1.0 - beta2).to(tl.float32), mask=mask)
    tl.store(out + _LR, lr.to(tl.float32), mask=mask)
    tl.store(out + mt.DECAY, (1.0 - lr * weight_decay).to(tl.float32), mask=mask)
    tl.store(out + mt.RUN, tl.where(mt.skipped(table), 0.0, 1.0), mask=mask)


@triton.jit
def lion_addresses(word, grad, tensors):
    """Of a tensor with one moment: the parameter's, the gradient's, the moment's and its scales'."""
    return (
        tl.load(word + mt.PARAM * tensors),
        grad,
        tl.load(word + mt.EXP_AVG * tensors),
        tl.load(word + mt.EXP_AVG_SCALE * tensors).to(tl.pointer_type(tl.float32)),
    )


@triton.jit
def lion_load(
    addresses, grad_factor, tile, KIND: tl.constexpr, P: tl.constexpr, G: tl.constexpr, VECTOR: tl.constexpr
):
    """p, g, the moment as it is stored, and its scale."""
    param, grad, exp_avg, scales = addresses
    p = load_floats(param, tile, P, VECTOR)
    g = load_floats(grad, tile, G, VECTOR)
    m = load_moment(exp_avg, tile, KIND, True, VECTOR)
    scale = load_scale(scales, tile, KIND)
    return p.to(tl.float32), g.to(tl.float32) * grad_factor, m, scale


@triton.jit
def lion_store(p, m, addresses, tile, tables, KIND: tl.constexpr, P: tl.constexpr, VECTOR: tl.constexpr):
    param, _, exp_avg, scales = addresses
    store_floats(p, param, tile, P, VECTOR)
    store_moment(m, exp_avg, scales, 0.5, tile, tables, KIND, True, VECTOR)


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count"])
def lion_kernel(
    table, scalars, tables, groups, tensors, first, count,
    KIND: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, VECTOR: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    tensor, word, grad, layout, first_tile = mt.find_work(table, groups, tensors, first, count, TILES)
    s = scalars + tensor * mt.SCALARS
    addresses, grad_factor = lion_addresses(word, grad, tensors), tl.load(s + mt.GRAD_FACTOR)
    beta1, one_minus_beta1 = tl.load(s + mt.BETA1), tl.load(s + mt.ONE_MINUS_BETA1)
    beta2, one_minus_beta2 = tl.load(s + mt.BETA2), tl.load(s + mt.ONE_MINUS_BETA2)
    lr, decay = tl.load(s + _LR), tl.load(s + mt.DECAY)
    for i in range(0, mt.tiles_if(s + mt.RUN, first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)):
        tile = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        p, g, m, scale = lion_load(addresses, grad_factor, tile, KIND, P, G, VECTOR)
        m = decayed(m, scale, 1.0, tables, KIND, True)
        p = p * decay - lr * sign(beta1 * m + one_minus_beta1 * g)
        m = beta2 * m + one_minus_beta2 * g
        lion_store(p, m, addresses, tile, tables, KIND, P, VECTOR)


def lion_step_(args: StepArgs) -> None:
    """The op behind Lion."""
    run_step(LION_STEP, args, lion_prologue, lion_kernel)
