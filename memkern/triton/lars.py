"""Kernels of memkern::lars_step_, LARS as in the LAMB paper and classic. Order: memkern/reference/lars.py."""

from __future__ import annotations

import triton
import triton.language as tl

from ..schemas import LARS_STEP, StepArgs
from . import step_table as st
from . import trust_ratio as tr
from .block_state import dequantize
from .launch_step import step_in_two_passes
from .lion import lion_addresses, lion_load, lion_store
from .sgd import MOMENTUM, NESTEROV, WEIGHT, WEIGHT_DECAY, sgd_decayed, sgd_momentum, sgd_parameter
from .squares import add_squares, zero_squares
from .tile import tile_of
from .weights import random_of

# Where a group's hyperparameters are in the table, in words of 8 bytes; trust_ratio.py has others.
_GROUP_MOMENTUM = st.word_of(LARS_STEP, "momentum")
_DAMPENING = st.word_of(LARS_STEP, "dampening")
_GROUP_WEIGHT_DECAY = st.word_of(LARS_STEP, "weight_decay")
_GROUP_NESTEROV = st.word_of(LARS_STEP, "nesterov")
_TRUST_COEFF = st.word_of(LARS_STEP, "trust_coeff")
_EPS = st.word_of(LARS_STEP, "eps")
# Where a layer's scalars are; step_table, sgd and trust_ratio have others.
_CLASSIC = st.scalar("classic")
_GRAD_RATIO = st.scalar("grad_ratio")


@triton.jit(do_not_specialize=["groups", "tensors", "passes"])
def lars_prologue(table, scalars, groups, tensors, passes):
    """Computes each layer's scalars (``LarsScalars`` in csrc/core/lars.h)."""
    columns, t, mask = st.tensors_of_program(table, groups, tensors)
    at = st.group_of(table, columns, tensors, t, mask)
    lr = st.read_scalar(at, mask)
    momentum, dampening = st.read_fp64(at + _GROUP_MOMENTUM, mask), st.read_fp64(at + _DAMPENING, mask)
    weight_decay = st.read_fp64(at + _GROUP_WEIGHT_DECAY, mask)
    classic = st.read_fp64(at + _TRUST_COEFF, mask) != 0.0
    factor = st.gradient_factor(table)
    factor = tl.where(st.read_fp64(at + tr.MAXIMIZE, mask) != 0.0, -factor, factor)
    # As in torch.optim.SGD, the first step's gradient is not dampened.
    step = tr.next_step(columns, tensors, t, mask)
    dampening = tl.where(step == 1, 0.0, dampening)

    out = scalars + t * st.SCALARS
    tl.store(out + st.GRAD_FACTOR, factor.to(tl.float32), mask=mask)
    tl.store(out + MOMENTUM, momentum.to(tl.float32), mask=mask)
    tl.store(out + WEIGHT, (1.0 - tl.where(classic, dampening, momentum)).to(tl.float32), mask=mask)
    tl.store(out + WEIGHT_DECAY, weight_decay.to(tl.float32), mask=mask)
    tl.store(out + _CLASSIC, tl.where(classic, 1.0, 0.0), mask=mask)
    tl.store(out + NESTEROV, tl.where(st.read_fp64(at + _GROUP_NESTEROV, mask) != 0.0, 1.0, 0.0), mask=mask)
    st.store_step_offset(out, step, mask)
    tl.store(out + _GRAD_RATIO, tl.full(t.shape, 1.0, tl.float32), mask=mask)
    tr.store_layer_scalars(table, columns, tensors, t, mask, out, at, lr, weight_decay, passes)


@triton.jit
def load_step_scalars(s):
    return (
        tl.load(s + st.GRAD_FACTOR),
        tl.load(s + MOMENTUM),
        tl.load(s + WEIGHT),
        tl.load(s + WEIGHT_DECAY),
        tl.load(s + _GRAD_RATIO),
    )


@triton.jit
def lars_load(
    addresses, step_scalars, tile, tables,
    KIND: tl.constexpr, PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Loads a tile; returns p, the gradient, what is added to the moment (times weight), and the updated moment."""
    grad_factor, momentum, weight, weight_decay, grad_ratio = step_scalars
    p, g, m, scale = lion_load(addresses, grad_factor, tile, KIND, PARAM_DTYPE, GRAD_DTYPE, VECTOR)
    d = grad_ratio * sgd_decayed(p, g, weight_decay)
    return p, g, d, sgd_momentum(d, dequantize(m, scale, 1.0, tables, KIND, True), momentum, weight)


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count", "programs_before"])
def lars_norm_tiles(
    table, scalars, tables, sums, programs_before, groups, tensors, first, count,
    KIND: tl.constexpr, PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr, FLAT: tl.constexpr,
    SLOW_FP64: tl.constexpr,
):  # fmt: skip
    """First pass: fp64 sums of squares of the parameter and, classic, of the gradient, else of the new moment."""
    tensor, word, grad, layout, first_tile = st.find_work(table, groups, tensors, first, count, TILES)
    s = scalars + tensor * st.SCALARS
    addresses, step_scalars = lion_addresses(word, grad, tensors), load_step_scalars(s)
    classic = tl.load(s + _CLASSIC) != 0.0
    params = zero_squares(ROWS, BLOCK_SIZE, VECTOR, SLOW_FP64)
    updates = zero_squares(ROWS, BLOCK_SIZE, VECTOR, SLOW_FP64)
    iterations = st.tiles_if(s + tr.ADAPT, first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)
    for i in range(0, iterations):
        tile = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        p, g, _d, m = lars_load(addresses, step_scalars, tile, tables, KIND, PARAM_DTYPE, GRAD_DTYPE, VECTOR)
        params = add_squares(params, p, SLOW_FP64)
        updates = add_squares(updates, tl.where(classic, g, m), SLOW_FP64)
    tr.store_squares(sums, programs_before + tl.program_id(0), params, updates)


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count", "programs_before", "programs", "passes"])
def lars_ratios(table, scalars, sums, programs_before, programs, groups, tensors, first, count, squares, passes):
    """A program for each layer computes its trust ratio and the scalars that depend on it."""
    _, columns = st.columns_of(table, groups, tensors)
    tensor, p_norm, norm = tr.norms_of_layer(
        columns, sums, programs_before, programs, tensors, first, count, squares, passes
    )
    s = scalars + tensor * st.SCALARS
    if (tl.load(s + tr.ADAPT) != 0.0) & (passes != tr.FIRST):
        always = tensor >= 0  # a mask that is true
        at = st.group_of(table, columns, tensors, tensor, always)
        lr, weight_decay = st.read_scalar(at, always), st.read_fp64(at + _GROUP_WEIGHT_DECAY, always)
        coeff, eps = st.read_fp64(at + _TRUST_COEFF, always), st.read_fp64(at + _EPS, always)
        clip = st.read_fp64(at + tr.TRUST_CLIP, always) != 0.0
        classic = coeff != 0.0
        unclipped = tl.where(classic, coeff * p_norm / (norm + p_norm * weight_decay + eps), p_norm / norm)
        ratio = tr.ratio_or_one(p_norm, norm, unclipped)
        ratio = tr.clip_ratio(tl.where(classic & clip, ratio / lr, ratio), clip).to(tl.float32)
        tl.store(tl.load(columns + st.TRUST_RATIO * tensors + tensor).to(tl.pointer_type(tl.float32)), ratio)
        tl.store(s + _GRAD_RATIO, tl.where(classic, ratio, 1.0))
        tl.store(s + st.RATE, tl.where(classic, lr, lr * ratio.to(tl.float64)).to(tl.float32))


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count"])
def lars_tiles(
    table, scalars, tables, groups, tensors, first, count,
    KIND: tl.constexpr, PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Second pass: updates parameters and moments."""
    tensor, word, grad, layout, first_tile = st.find_work(table, groups, tensors, first, count, TILES)
    s = scalars + tensor * st.SCALARS
    addresses, step_scalars = lion_addresses(word, grad, tensors), load_step_scalars(s)
    momentum, rate, nesterov = tl.load(s + MOMENTUM), tl.load(s + st.RATE), tl.load(s + NESTEROV) != 0.0
    u, r = st.dither_of(s, BLOCK_SIZE), random_of(s, BLOCK_SIZE, PARAM_DTYPE)
    iterations = st.tiles_if(s + st.RUN, first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)
    for i in range(0, iterations):
        tile = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        p, _g, d, m = lars_load(addresses, step_scalars, tile, tables, KIND, PARAM_DTYPE, GRAD_DTYPE, VECTOR)
        p = sgd_parameter(p, d, m, rate, momentum, nesterov)
        lion_store(p, m, addresses, u, r, tile, tables, KIND, PARAM_DTYPE, VECTOR)


def lars_step_(args: StepArgs) -> None:
    """The op behind LARS."""
    step_in_two_passes(LARS_STEP, args, lars_prologue, lars_norm_tiles, lars_ratios, lars_tiles)
