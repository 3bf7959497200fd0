"""memkern::adam_step_: Adam, AdamW and the moments that LAMB shares. Order of operations: memkern/reference/adam.py."""

from __future__ import annotations

import triton
import triton.language as tl

from ..schemas import ADAM_STEP, StepArgs
from . import multi_tensor as mt
from .codec import POWER, dither
from .moment import decayed, load_moment, load_scale, store_moment
from .table import run_step
from .tiles import load_floats, store_floats, tile_of

# Words of a group.
_BETA1 = mt.word_of(ADAM_STEP, "beta1")
_BETA2 = mt.word_of(ADAM_STEP, "beta2")
_EPS = mt.word_of(ADAM_STEP, "eps")
_WEIGHT_DECAY = mt.word_of(ADAM_STEP, "weight_decay")
_DECOUPLED = mt.word_of(ADAM_STEP, "decoupled_weight_decay")
_MAXIMIZE = mt.word_of(ADAM_STEP, "maximize")
# Words of a tensor's scalars beside those of multi_tensor.py (AdamScalars in csrc/core/adam.h).
ROOT_BETA2 = tl.constexpr(5)
EPS = tl.constexpr(6)
STEP_SIZE = tl.constexpr(7)
COUPLED_DECAY = tl.constexpr(9)
STEP_OFFSET = tl.constexpr(10)  # what the dither needs of the step: a uint32


@triton.jit
def adam_moments(m, v, g, one_minus_beta1, one_minus_beta2):
    """m = m + (1 - beta1) g; v = v + (1 - beta2) g g, of moments that come in decayed: times beta1 and beta2."""
    return m + one_minus_beta1 * g, v + (one_minus_beta2 * g) * g


@triton.jit
def adam_direction(m, w, eps):
    """m / (w + eps), w = sqrt(v)."""
    return tl.math.div_rn(m, w + eps)


@triton.jit
def adam_scalars(out, mask, lr, beta1, beta2, eps, grad_factor, n, corrected):
    """Tensors' scalars, but for the decays and RUN; uncorrected the biases are left in."""
    root2 = tl.where(corrected, tl.sqrt(1.0 - mt.power_of(beta2, n)), 1.0)
    bias1 = tl.where(corrected, 1.0 - mt.power_of(beta1, n), 1.0)
    tl.store(out + mt.GRAD_FACTOR, grad_factor.to(tl.float32), mask=mask)
    tl.store(out + mt.BETA1, beta1.to(tl.float32), mask=mask)
    tl.store(out + mt.ONE_MINUS_BETA1, (1.0 - beta1).to(tl.float32), mask=mask)
    tl.store(out + mt.BETA2, beta2.to(tl.float32), mask=mask)
    tl.store(out + mt.ONE_MINUS_BETA2, (1.0 - beta2).to(tl.float32), mask=mask)
    tl.store(out + ROOT_BETA2, tl.sqrt(beta2).to(tl.float32), mask=mask)
    tl.store(out + EPS, (eps * root2).to(tl.float32), mask=mask)
    tl.store(out + STEP_SIZE, (lr * root2 / bias1).to(tl.float32), mask=mask)
    tl.store(out + STEP_OFFSET, (n * mt.DITHER_STEP).to(tl.int32).to(tl.float32, bitcast=True), mask=mask)


@triton.jit(do_not_specialize=["groups", "tensors"])
def adam_prologue(table, scalars, groups, tensors):
    """Advances the steps, and leaves each tensor's scalars for the main kernel."""
    columns, t, mask = mt.tensors_of_program(table, groups, tensors)
    at = mt.group_of(table, columns, tensors, t, mask)
    lr = mt.read_number(at, mask)
    beta1 = mt.read_fp64(at + _BETA1, mask)
    beta2 = mt.read_fp64(at + _BETA2, mask)
    eps = mt.read_fp64(at + _EPS, mask)
    weight_decay = mt.read_fp64(at + _WEIGHT_DECAY, mask)
    decoupled = mt.read_fp64(at + _DECOUPLED, mask) != 0.0
    maximize = mt.read_fp64(at + _MAXIMIZE, mask) != 0.0
    factor = mt.gradient_factor(table)
    run = mt.skipped(table) == 0

    step_at = tl.load(columns + mt.STEP * tensors + t, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(step_at, mask=mask, other=0.0)
    step = tl.where(run, step + 1.0, step)
    tl.store(step_at, step, mask=mask)

    out = scalars + t * mt.SCALARS
    tl.store(out + mt.DECAY, tl.where(decoupled, 1.0 - lr * weight_decay, 1.0).to(tl.float32), mask=mask)
    tl.store(out + COUPLED_DECAY, tl.where(decoupled, 0.0, weight_decay).to(tl.float32), mask=mask)
    tl.store(out + mt.RUN, tl.where(run, 1.0, 0.0), mask=mask)
    adam_scalars(
        out, mask, lr, beta1, beta2, eps, tl.where(maximize, -factor, factor), step.to(tl.int64), mask | True
    )


@triton.jit
def adam_fields(word, grad, s, tensors, BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr):
    """What there is to know of a tensor: addresses; the scalars of gradient, moments and parameter; the dither."""
    addresses = (
        tl.load(word + mt.PARAM * tensors),
        grad,
        tl.load(word + mt.EXP_AVG * tensors),
        tl.load(word + mt.EXP_AVG_SQ * tensors),
        tl.load(word + mt.EXP_AVG_SCALE * tensors).to(tl.pointer_type(tl.float32)),
        tl.load(word + mt.EXP_AVG_SQ_SCALE * tensors).to(tl.pointer_type(tl.float32)),
    )
    of_gradient = tl.load(s + mt.GRAD_FACTOR), tl.load(s + COUPLED_DECAY)
    decay2 = tl.load(s + (ROOT_BETA2 if KIND == POWER else mt.BETA2))  # power codes hold w = sqrt(v)
    of_moments = (
        tl.load(s + mt.BETA1),
        tl.load(s + mt.ONE_MINUS_BETA1),
        decay2,
        tl.load(s + mt.ONE_MINUS_BETA2),
    )
    u = dither(tl.arange(0, BLOCK_SIZE), tl.load(s + STEP_OFFSET).to(tl.uint32, bitcast=True))[None, :]
    of_param = tl.load(s + EPS), tl.load(s + STEP_SIZE), tl.load(s + mt.DECAY)
    return addresses, of_gradient, of_moments, of_param, u


@triton.jit
def adam_load(
    addresses, of_gradient, of_moments, tile, tables,
    KIND: tl.constexpr, P: tl.constexpr, G: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """p, and the new m and v."""
    param, grad, exp_avg, exp_avg_sq, m_scales, v_scales = addresses
    # All loads before all else: they wait together.
    p = load_floats(param, tile, P, VECTOR)
    g = load_floats(grad, tile, G, VECTOR)
    m = load_moment(exp_avg, tile, KIND, True, VECTOR)
    v = load_moment(exp_avg_sq, tile, KIND, False, VECTOR)
    m_scale = load_scale(m_scales, tile, KIND)
    v_scale = load_scale(v_scales, tile, KIND)

    grad_factor, coupled_decay = of_gradient
    beta1, one_minus_beta1, decay2, one_minus_beta2 = of_moments
    p = p.to(tl.float32)
    g = g.to(tl.float32) * grad_factor
    if coupled_decay != 0.0:
        g = g + coupled_decay * p
    m = decayed(m, m_scale, beta1, tables, KIND, True)
    v = decayed(v, v_scale, decay2, tables, KIND, False)
    if KIND == POWER:
        v = v * v
    m, v = adam_moments(m, v, g, one_minus_beta1, one_minus_beta2)
    return p, m, v


@triton.jit
def adam_store(
    p, m, v, w, addresses, u, tile, tables, KIND: tl.constexpr, P: tl.constexpr, VECTOR: tl.constexpr
):
    param, _, exp_avg, exp_avg_sq, m_scales, v_scales = addresses
    store_floats(p, param, tile, P, VECTOR)
    store_moment(m, exp_avg, m_scales, u, tile, tables, KIND, True, VECTOR)
    x = w if KIND == POWER else v
    store_moment(x, exp_avg_sq, v_scales, u, tile, tables, KIND, False, VECTOR)


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count"])
def adam_kernel(
    table, scalars, tables, groups, tensors, first, count,
    KIND: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, VECTOR: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    tensor, word, grad, layout, first_tile = mt.find_work(table, groups, tensors, first, count, TILES)
    s = scalars + tensor * mt.SCALARS
    addresses, of_gradient, of_moments, of_param, u = adam_fields(word, grad, s, tensors, BLOCK_SIZE, KIND)
    eps, step_size, decay = of_param
    for i in range(0, mt.tiles_if(s + mt.RUN, first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)):
        tile = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        p, m, v = adam_load(addresses, of_gradient, of_moments, tile, tables, KIND, P, G, VECTOR)
        w = tl.math.sqrt_rn(v)
        p = p * decay - step_size * adam_direction(m, w, eps)
        adam_store(p, m, v, w, addresses, u, tile, tables, KIND, P, VECTOR)


def adam_step_(args: StepArgs) -> None:
    """The op behind Adam and AdamW."""
    run_step(ADAM_STEP, args, adam_prologue, adam_kernel)
