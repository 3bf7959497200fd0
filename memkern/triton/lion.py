"""Kernels of memkern::lion_step_. Order of operations: memkern/reference/lion.py."""

from __future__ import annotations

import triton
import triton.language as tl

from ..schemas import LION_STEP, StepArgs
from . import step_table as st
from .block_state import dequantize, load_moment, load_scale, store_moment
from .launch_step import step_in_one_pass
from .tile import load_floats, tile_of
from .weights import join_weights, load_weights, random_of, store_weights

# Where a group's hyperparameters are in the table (step_table.py), in words of 8 bytes.
_BETA1 = st.word_of(LION_STEP, "beta1")
_BETA2 = st.word_of(LION_STEP, "beta2")
_WEIGHT_DECAY = st.word_of(LION_STEP, "weight_decay")
_MAXIMIZE = st.word_of(LION_STEP, "maximize")
# Where a tensor's learning rate is; step_table.py has the scalars that optimizers share.
_LR = st.scalar("lr")


@triton.jit
def sign(x):
    """-1, 0 or 1; NaN stays NaN, and so does the sign of zero."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit(do_not_specialize=["groups", "tensors"])
def lion_prologue(table, scalars, groups, tensors):
    """Increments the tensors' steps and computes their scalars."""
    columns, t, mask = st.tensors_of_program(table, groups, tensors)
    at = st.group_of(table, columns, tensors, t, mask)
    lr = st.read_scalar(at, mask)
    beta1 = st.read_fp64(at + _BETA1, mask)
    beta2 = st.read_fp64(at + _BETA2, mask)
    weight_decay = st.read_fp64(at + _WEIGHT_DECAY, mask)
    maximize = st.read_fp64(at + _MAXIMIZE, mask) != 0.0
    factor = st.gradient_factor(table)
    step = st.increment_steps(table, columns, tensors, t, mask)

    out = scalars + t * st.SCALARS
    tl.store(out + st.GRAD_FACTOR, tl.where(maximize, -factor, factor).to(tl.float32), mask=mask)
    tl.store(out + st.BETA1, beta1.to(tl.float32), mask=mask)
    tl.store(out + st.ONE_MINUS_BETA1, (1.0 - beta1).to(tl.float32), mask=mask)
    tl.store(out + st.BETA2, beta2.to(tl.float32), mask=mask)
    tl.store(out + st.ONE_MINUS_BETA2, (1.0 - beta2).to(tl.float32), mask=mask)
    tl.store(out + _LR, lr.to(tl.float32), mask=mask)
    st.store_step_offset(out, step, mask)
    tl.store(out + st.DECAY, (1.0 - lr * weight_decay).to(tl.float32), mask=mask)
    tl.store(out + st.RUN, tl.where(st.skipped(table), 0.0, 1.0), mask=mask)


@triton.jit
def lion_addresses(word, grad, tensors):
    """The addresses of a tensor with one moment: parameter, gradient, moment, scales, weight state."""
    return (
        tl.load(word + st.PARAM * tensors),
        grad,
        tl.load(word + st.M * tensors),
        tl.load(word + st.M_SCALE * tensors).to(tl.pointer_type(tl.float32)),
        tl.load(word + st.WEIGHT_STATE * tensors),
    )


@triton.jit
def lion_load(
    addresses, grad_factor, tile,
    KIND: tl.constexpr, PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Loads a tile; returns p, g, the moment as it is stored, and its scale."""
    param, grad, exp_avg, scales, weight_state = addresses
    p, p_state = load_weights(param, weight_state, tile, PARAM_DTYPE, VECTOR)
    g = load_floats(grad, tile, GRAD_DTYPE, VECTOR)
    m = load_moment(exp_avg, tile, KIND, True, VECTOR)
    scale = load_scale(scales, tile, KIND)
    return join_weights(p, p_state, PARAM_DTYPE), g.to(tl.float32) * grad_factor, m, scale


@triton.jit
def lion_store(
    p, m, addresses, u, r, tile, tables, KIND: tl.constexpr, PARAM_DTYPE: tl.constexpr, VECTOR: tl.constexpr
):
    param, _, exp_avg, scales, weight_state = addresses
    store_weights(p, param, weight_state, r, tile, PARAM_DTYPE, VECTOR)
    store_moment(m, exp_avg, scales, u, tile, tables, KIND, True, VECTOR)


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count"])
def lion_tiles(
    table, scalars, tables, groups, tensors, first, count,
    KIND: tl.constexpr, PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Updates parameters and moments, in a program's tiles of one tensor."""
    tensor, word, grad, layout, first_tile = st.find_work(table, groups, tensors, first, count, TILES)
    s = scalars + tensor * st.SCALARS
    addresses, grad_factor = lion_addresses(word, grad, tensors), tl.load(s + st.GRAD_FACTOR)
    beta1, one_minus_beta1 = tl.load(s + st.BETA1), tl.load(s + st.ONE_MINUS_BETA1)
    beta2, one_minus_beta2 = tl.load(s + st.BETA2), tl.load(s + st.ONE_MINUS_BETA2)
    lr, decay = tl.load(s + _LR), tl.load(s + st.DECAY)
    u, r = st.dither_of(s, BLOCK_SIZE), random_of(s, BLOCK_SIZE, PARAM_DTYPE)
    iterations = st.tiles_if(s + st.RUN, first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)
    for i in range(0, iterations):
        tile = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        p, g, m, scale = lion_load(addresses, grad_factor, tile, KIND, PARAM_DTYPE, GRAD_DTYPE, VECTOR)
        m = dequantize(m, scale, 1.0, tables, KIND, True)
        p = p * decay - lr * sign(beta1 * m + one_minus_beta1 * g)
        m = beta2 * m + one_minus_beta2 * g
        lion_store(p, m, addresses, u, r, tile, tables, KIND, PARAM_DTYPE, VECTOR)


def lion_step_(args: StepArgs) -> None:
    """The op behind Lion."""
    step_in_one_pass(LION_STEP, args, lion_prologue, lion_tiles)
