"""Kernels of memkern::lamb_step_: Adam's direction, a trust ratio for each layer. Order: memkern/reference/lamb.py."""

from __future__ import annotations

import triton
import triton.language as tl

from ..schemas import LAMB_STEP, StepArgs
from . import step_table as st
from . import trust_ratio as tr
from .adam import COUPLED_DECAY, adam_direction, adam_load, adam_scalars, adam_store, adam_tensor
from .fast_path import absmax_or_nan, has_fast_path, in_fast_range
from .launch_step import step_in_two_passes
from .squares import add_squares, zero_squares
from .tile import tile_of
from .weights import random_of

# Where a group's hyperparameters are in the table, in words of 8 bytes; trust_ratio.py has others.
_BETA1 = st.word_of(LAMB_STEP, "beta1")
_BETA2 = st.word_of(LAMB_STEP, "beta2")
_EPS = st.word_of(LAMB_STEP, "eps")
_WEIGHT_DECAY = st.word_of(LAMB_STEP, "weight_decay")
_DECOUPLED = st.word_of(LAMB_STEP, "decoupled_decay")
_BIAS_CORRECTION = st.word_of(LAMB_STEP, "bias_correction")
# A word of a layer's scalars, beside those of adam.py and trust_ratio.py.
_UPDATE_DECAY = st.scalar("update_decay")  # weight_decay where it is part of the update, else 0


@triton.jit(do_not_specialize=["groups", "tensors", "passes"])
def lamb_prologue(table, scalars, groups, tensors, passes):
    """Computes each layer's scalars (``LambScalars`` in csrc/core/lamb.h)."""
    columns, t, mask = st.tensors_of_program(table, groups, tensors)
    at = st.group_of(table, columns, tensors, t, mask)
    lr = st.read_scalar(at, mask)
    beta1 = st.read_fp64(at + _BETA1, mask)
    beta2 = st.read_fp64(at + _BETA2, mask)
    eps = st.read_fp64(at + _EPS, mask)
    weight_decay = st.read_fp64(at + _WEIGHT_DECAY, mask)
    decoupled = st.read_fp64(at + _DECOUPLED, mask) != 0.0
    corrected = st.read_fp64(at + _BIAS_CORRECTION, mask) != 0.0
    factor = st.gradient_factor(table)
    factor = tl.where(st.read_fp64(at + tr.MAXIMIZE, mask) != 0.0, -factor, factor)

    out = scalars + t * st.SCALARS
    # With lr 1 the step size is the direction's true scale, which the norm needs.
    one = tl.full(t.shape, 1.0, tl.float64)
    adam_scalars(out, mask, one, beta1, beta2, eps, factor, tr.next_step(columns, tensors, t, mask), corrected)
    tl.store(out + st.DECAY, tl.where(decoupled, 1.0 - lr * weight_decay, 1.0).to(tl.float32), mask=mask)
    tl.store(out + COUPLED_DECAY, tl.zeros(t.shape, tl.float32), mask=mask)
    tl.store(out + _UPDATE_DECAY, tl.where(decoupled, 0.0, weight_decay).to(tl.float32), mask=mask)
    tr.store_layer_scalars(table, columns, tensors, t, mask, out, at, lr, weight_decay, passes)


@triton.jit
def lamb_update(p, m, v, eps, step_size, update_decay, FAST: tl.constexpr):
    """The update of a parameter, which is multiplied by -rate, and w = sqrt(v); p: after decoupled decay."""
    direction, w = adam_direction(m, v, eps, FAST)
    update = step_size * direction
    if update_decay != 0.0:
        update = update + update_decay * p
    return update, w


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count", "programs_before"])
def lamb_norm_tiles(
    table, scalars, tables, sums, programs_before, groups, tensors, first, count,
    KIND: tl.constexpr, PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr, FLAT: tl.constexpr,
    SLOW_FP64: tl.constexpr,
):  # fmt: skip
    """First pass: the sums of squares, in fp64, of the parameters and of their updates. Nothing else is written."""
    tensor, word, grad, layout, first_tile = st.find_work(table, groups, tensors, first, count, TILES)
    s = scalars + tensor * st.SCALARS
    addresses, grad_scalars, moment_scalars, param_scalars, _u = adam_tensor(word, grad, s, tensors, BLOCK_SIZE, KIND)
    eps, step_size, decay = param_scalars
    update_decay = tl.load(s + _UPDATE_DECAY)
    params = zero_squares(ROWS, BLOCK_SIZE, VECTOR, SLOW_FP64)
    updates = zero_squares(ROWS, BLOCK_SIZE, VECTOR, SLOW_FP64)
    iterations = st.tiles_if(s + tr.ADAPT, first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)
    for i in range(0, iterations):
        tile = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        p, m, v = adam_load(
            addresses, grad_scalars, moment_scalars, tile, tables, KIND, PARAM_DTYPE, GRAD_DTYPE, VECTOR
        )
        p = p * decay
        if has_fast_path(KIND):
            m_absmax, v_absmax = absmax_or_nan(m, True), absmax_or_nan(v, False)
            if in_fast_range(m, v, m_absmax, v_absmax, eps, tile[2], VECTOR, FLAT):
                update, _w = lamb_update(p, m, v, eps, step_size, update_decay, True)
            else:
                update, _w = lamb_update(p, m, v, eps, step_size, update_decay, False)
        else:
            update, _w = lamb_update(p, m, v, eps, step_size, update_decay, False)
        update = tl.where(tile[2], update, 0.0)  # outside of the mask it may be 0 / 0
        params = add_squares(params, p, SLOW_FP64)
        updates = add_squares(updates, update, SLOW_FP64)
    tr.store_squares(sums, programs_before + tl.program_id(0), params, updates)


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count", "programs_before", "programs", "passes"])
def lamb_ratios(table, scalars, sums, programs_before, programs, groups, tensors, first, count, squares, passes):
    """A program for each layer computes its trust ratio and its rate."""
    _, columns = st.columns_of(table, groups, tensors)
    tensor, p_norm, norm = tr.norms_of_layer(
        columns, sums, programs_before, programs, tensors, first, count, squares, passes
    )
    s = scalars + tensor * st.SCALARS
    if (tl.load(s + tr.ADAPT) != 0.0) & (passes != tr.FIRST):
        always = tensor >= 0  # a mask that is true
        at = st.group_of(table, columns, tensors, tensor, always)
        ratio = tr.ratio_or_one(p_norm, norm, p_norm / norm)
        ratio = tr.clip_ratio(ratio, st.read_fp64(at + tr.TRUST_CLIP, always) != 0.0).to(tl.float32)
        tl.store(tl.load(columns + st.TRUST_RATIO * tensors + tensor).to(tl.pointer_type(tl.float32)), ratio)
        tl.store(s + st.RATE, (st.read_scalar(at, always) * ratio.to(tl.float64)).to(tl.float32))


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count"])
def lamb_tiles(
    table, scalars, tables, groups, tensors, first, count,
    KIND: tl.constexpr, PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Second pass: updates parameters and moments."""
    tensor, word, grad, layout, first_tile = st.find_work(table, groups, tensors, first, count, TILES)
    s = scalars + tensor * st.SCALARS
    addresses, grad_scalars, moment_scalars, param_scalars, u = adam_tensor(word, grad, s, tensors, BLOCK_SIZE, KIND)
    eps, step_size, decay = param_scalars
    update_decay, rate = tl.load(s + _UPDATE_DECAY), tl.load(s + st.RATE)
    r = random_of(s, BLOCK_SIZE, PARAM_DTYPE)
    iterations = st.tiles_if(s + st.RUN, first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)
    for i in range(0, iterations):
        tile = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        p, m, v = adam_load(
            addresses, grad_scalars, moment_scalars, tile, tables, KIND, PARAM_DTYPE, GRAD_DTYPE, VECTOR
        )
        p = p * decay
        if has_fast_path(KIND):
            m_absmax, v_absmax = absmax_or_nan(m, True), absmax_or_nan(v, False)
            if in_fast_range(m, v, m_absmax, v_absmax, eps, tile[2], VECTOR, FLAT):
                update, w = lamb_update(p, m, v, eps, step_size, update_decay, True)
                adam_store(
                    p - rate * update, m, v, w, m_absmax, v_absmax, addresses, u, r, tile, tables,
                    KIND, PARAM_DTYPE, VECTOR, True,
                )  # fmt: skip
            else:
                update, w = lamb_update(p, m, v, eps, step_size, update_decay, False)
                adam_store(
                    p - rate * update, m, v, w, m_absmax, v_absmax, addresses, u, r, tile, tables,
                    KIND, PARAM_DTYPE, VECTOR, False,
                )  # fmt: skip
        else:
            update, w = lamb_update(p, m, v, eps, step_size, update_decay, False)
            adam_store(
                p - rate * update, m, v, w, 0.0, 0.0, addresses, u, r, tile, tables,
                KIND, PARAM_DTYPE, VECTOR, False,
            )  # fmt: skip


def lamb_step_(args: StepArgs) -> None:
    """The op behind LAMB."""
    step_in_two_passes(LAMB_STEP, args, lamb_prologue, lamb_norm_tiles, lamb_ratios, lamb_tiles)
