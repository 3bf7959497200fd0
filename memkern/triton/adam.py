"""Kernels of memkern::adam_step_ (Adam, AdamW), which LAMB shares. Order of operations: memkern/reference/adam.py."""

from __future__ import annotations

import triton
import triton.language as tl

from ..schemas import ADAM_STEP, StepArgs
from . import step_table as st
from .block_state import dequantize, load_moment, load_scale, store_codes, store_moment
from .codec import DYNAMIC, POWER, code_root
from .fast_path import absmax_or_nan, fast_codes, fast_divide, has_fast_path, in_fast_range
from .launch_step import step_in_one_pass
from .tile import load_floats, tile_of
from .weights import join_weights, load_weights, random_of, store_weights

# Where a group's hyperparameters are in the table (step_table.py), in words of 8 bytes.
_BETA1 = st.word_of(ADAM_STEP, "beta1")
_BETA2 = st.word_of(ADAM_STEP, "beta2")
_EPS = st.word_of(ADAM_STEP, "eps")
_WEIGHT_DECAY = st.word_of(ADAM_STEP, "weight_decay")
_DECOUPLED = st.word_of(ADAM_STEP, "decoupled_weight_decay")
_MAXIMIZE = st.word_of(ADAM_STEP, "maximize")
# Where a tensor's scalars are; step_table.py has those that optimizers share.
ROOT_BETA2 = st.scalar("root_beta2")
EPS = st.scalar("eps")
STEP_SIZE = st.scalar("step_size")
COUPLED_DECAY = st.scalar("coupled_decay")


@triton.jit
def adam_moments(m, v, g, one_minus_beta1, one_minus_beta2):
    """m = m + (1 - beta1) g; v = v + (1 - beta2) g g, of moments that are already multiplied by beta1 and beta2."""
    return m + one_minus_beta1 * g, v + (one_minus_beta2 * g) * g


@triton.jit
def adam_direction(m, v, eps, FAST: tl.constexpr):
    """m / (w + eps), and w = sqrt(v). FAST: the tile is in the range of fast_path.py."""
    if FAST:
        w = code_root(v)
        return fast_divide(m, w + eps), w
    else:
        w = tl.math.sqrt_rn(v)
        return tl.math.div_rn(m, w + eps), w


@triton.jit
def adam_scalars(out, mask, lr, beta1, beta2, eps, grad_factor, step, corrected):
    """Stores tensors' scalars except decays and RUN. Where not ``corrected``, there is no bias correction (LAMB)."""
    root2 = tl.where(corrected, tl.sqrt(1.0 - st.power_of(beta2, step)), 1.0)
    bias1 = tl.where(corrected, 1.0 - st.power_of(beta1, step), 1.0)
    tl.store(out + st.GRAD_FACTOR, grad_factor.to(tl.float32), mask=mask)
    tl.store(out + st.BETA1, beta1.to(tl.float32), mask=mask)
    tl.store(out + st.ONE_MINUS_BETA1, (1.0 - beta1).to(tl.float32), mask=mask)
    tl.store(out + st.BETA2, beta2.to(tl.float32), mask=mask)
    tl.store(out + st.ONE_MINUS_BETA2, (1.0 - beta2).to(tl.float32), mask=mask)
    tl.store(out + ROOT_BETA2, tl.sqrt(beta2).to(tl.float32), mask=mask)
    tl.store(out + EPS, (eps * root2).to(tl.float32), mask=mask)
    tl.store(out + STEP_SIZE, (lr * root2 / bias1).to(tl.float32), mask=mask)
    st.store_step_offset(out, step, mask)


@triton.jit(do_not_specialize=["groups", "tensors"])
def adam_prologue(table, scalars, groups, tensors):
    """Increments the tensors' steps and computes their scalars."""
    columns, t, mask = st.tensors_of_program(table, groups, tensors)
    at = st.group_of(table, columns, tensors, t, mask)
    lr = st.read_scalar(at, mask)
    beta1 = st.read_fp64(at + _BETA1, mask)
    beta2 = st.read_fp64(at + _BETA2, mask)
    eps = st.read_fp64(at + _EPS, mask)
    weight_decay = st.read_fp64(at + _WEIGHT_DECAY, mask)
    decoupled = st.read_fp64(at + _DECOUPLED, mask) != 0.0
    maximize = st.read_fp64(at + _MAXIMIZE, mask) != 0.0
    factor = st.gradient_factor(table)
    run = st.skipped(table) == 0
    step = st.increment_steps(table, columns, tensors, t, mask)

    out = scalars + t * st.SCALARS
    tl.store(out + st.DECAY, tl.where(decoupled, 1.0 - lr * weight_decay, 1.0).to(tl.float32), mask=mask)
    tl.store(out + COUPLED_DECAY, tl.where(decoupled, 0.0, weight_decay).to(tl.float32), mask=mask)
    tl.store(out + st.RUN, tl.where(run, 1.0, 0.0), mask=mask)
    factor = tl.where(maximize, -factor, factor)
    adam_scalars(out, mask, lr, beta1, beta2, eps, factor, step, mask | True)  # all are corrected


@triton.jit
def adam_tensor(word, grad, s, tensors, BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr):
    """A tensor's addresses, the scalars for its gradient, moments and parameter, and its dither."""
    addresses = (
        tl.load(word + st.PARAM * tensors),
        grad,
        tl.load(word + st.M * tensors),
        tl.load(word + st.V * tensors),
        tl.load(word + st.M_SCALE * tensors).to(tl.pointer_type(tl.float32)),
        tl.load(word + st.V_SCALE * tensors).to(tl.pointer_type(tl.float32)),
        tl.load(word + st.WEIGHT_STATE * tensors),
    )
    grad_scalars = tl.load(s + st.GRAD_FACTOR), tl.load(s + COUPLED_DECAY)
    # Power codes hold w = sqrt(v).
    decay2 = tl.load(s + (ROOT_BETA2 if KIND == POWER else st.BETA2))
    moment_scalars = (
        tl.load(s + st.BETA1),
        tl.load(s + st.ONE_MINUS_BETA1),
        decay2,
        tl.load(s + st.ONE_MINUS_BETA2),
    )
    u = st.dither_of(s, BLOCK_SIZE)
    param_scalars = tl.load(s + EPS), tl.load(s + STEP_SIZE), tl.load(s + st.DECAY)
    return addresses, grad_scalars, moment_scalars, param_scalars, u


@triton.jit
def adam_load(
    addresses, grad_scalars, moment_scalars, tile, tables,
    KIND: tl.constexpr, PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Loads a tile; returns p and the updated m and v."""
    param, grad, exp_avg, exp_avg_sq, m_scales, v_scales, weight_state = addresses
    # All loads first, so that they are in flight together.
    p, p_state = load_weights(param, weight_state, tile, PARAM_DTYPE, VECTOR)
    g = load_floats(grad, tile, GRAD_DTYPE, VECTOR)
    m = load_moment(exp_avg, tile, KIND, True, VECTOR)
    v = load_moment(exp_avg_sq, tile, KIND, False, VECTOR)
    m_scale = load_scale(m_scales, tile, KIND)
    v_scale = load_scale(v_scales, tile, KIND)

    grad_factor, coupled_decay = grad_scalars
    beta1, one_minus_beta1, decay2, one_minus_beta2 = moment_scalars
    p = join_weights(p, p_state, PARAM_DTYPE)
    g = g.to(tl.float32)
    # One branch for the tile: most steps neither scale gradients nor have coupled decay. Not with dynamic codes: LAMB's
    # tiles would spill two registers on sm_90.
    if (grad_factor != 1.0) | (coupled_decay != 0.0) | (KIND == DYNAMIC):
        g = g * grad_factor
        if coupled_decay != 0.0:
            g = g + coupled_decay * p
    m = dequantize(m, m_scale, beta1, tables, KIND, True)
    v = dequantize(v, v_scale, decay2, tables, KIND, False)
    if KIND == POWER:
        v = v * v
    m, v = adam_moments(m, v, g, one_minus_beta1, one_minus_beta2)
    return p, m, v


@triton.jit
def adam_store(
    p, m, v, w, m_absmax, v_absmax, addresses, u, r, tile, tables,
    KIND: tl.constexpr, PARAM_DTYPE: tl.constexpr, VECTOR: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Stores a tile. ``m_absmax``, ``v_absmax``: of its blocks, read where FAST."""
    param, _, exp_avg, exp_avg_sq, m_scales, v_scales, weight_state = addresses
    store_weights(p, param, weight_state, r, tile, PARAM_DTYPE, VECTOR)
    if FAST:
        codes = fast_codes(m, m_absmax, u, KIND, True)
        store_codes(codes, m_absmax, exp_avg, m_scales, tile, KIND, True, VECTOR)
        w_absmax = code_root(v_absmax)  # the root is monotonic
        codes = fast_codes(w, w_absmax, u, KIND, False)
        store_codes(codes, w_absmax, exp_avg_sq, v_scales, tile, KIND, False, VECTOR)
    else:
        store_moment(m, exp_avg, m_scales, u, tile, tables, KIND, True, VECTOR)
        x = w if KIND == POWER else v
        store_moment(x, exp_avg_sq, v_scales, u, tile, tables, KIND, False, VECTOR)


@triton.jit
def adam_update(
    p, m, v, m_absmax, v_absmax, addresses, param_scalars, u, r, tile, tables,
    KIND: tl.constexpr, PARAM_DTYPE: tl.constexpr, VECTOR: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    eps, step_size, decay = param_scalars
    direction, w = adam_direction(m, v, eps, FAST)
    p = p * decay - step_size * direction
    adam_store(p, m, v, w, m_absmax, v_absmax, addresses, u, r, tile, tables, KIND, PARAM_DTYPE, VECTOR, FAST)


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count"])
def adam_tiles(
    table, scalars, tables, groups, tensors, first, count,
    KIND: tl.constexpr, PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Updates parameters and moments, in a program's tiles of one tensor."""
    tensor, word, grad, layout, first_tile = st.find_work(table, groups, tensors, first, count, TILES)
    s = scalars + tensor * st.SCALARS
    addresses, grad_scalars, moment_scalars, param_scalars, u = adam_tensor(word, grad, s, tensors, BLOCK_SIZE, KIND)
    r = random_of(s, BLOCK_SIZE, PARAM_DTYPE)
    iterations = st.tiles_if(s + st.RUN, first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)
    for i in range(0, iterations):
        tile = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        p, m, v = adam_load(
            addresses, grad_scalars, moment_scalars, tile, tables, KIND, PARAM_DTYPE, GRAD_DTYPE, VECTOR
        )
        if has_fast_path(KIND):
            m_absmax, v_absmax = absmax_or_nan(m, True), absmax_or_nan(v, False)
            if in_fast_range(m, v, m_absmax, v_absmax, param_scalars[0], tile[2], VECTOR, FLAT):
                adam_update(
                    p, m, v, m_absmax, v_absmax, addresses, param_scalars, u, r, tile, tables,
                    KIND, PARAM_DTYPE, VECTOR, True,
                )  # fmt: skip
            else:
                adam_update(
                    p, m, v, m_absmax, v_absmax, addresses, param_scalars, u, r, tile, tables,
                    KIND, PARAM_DTYPE, VECTOR, False,
                )  # fmt: skip
        else:
            adam_update(
                p, m, v, 0.0, 0.0, addresses, param_scalars, u, r, tile, tables,
                KIND, PARAM_DTYPE, VECTOR, False,
            )  # fmt: skip


def adam_step_(args: StepArgs) -> None:
    """The op behind Adam and AdamW."""
    step_in_one_pass(ADAM_STEP, args, adam_prologue, adam_tiles)
