"""memkern::adam_step_: Adam, AdamW and the moments that LAMB shares. Order of operations: memkern/reference/adam.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import multi_tensor as mt
from .codec import POWER, dither
from .moment import decayed, load_scale, moment_pointer, store_moment
from .step_args import Moment, StepArgs
from .table import run_step
from .tiles import float_pointer, tile_of


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
    """Words 0 to 7 and 10 of tensors' scalars (AdamScalars in csrc/core/adam.h); uncorrected the biases are left in."""
    root2 = tl.where(corrected, tl.sqrt(1.0 - mt.power_of(beta2, n)), 1.0)
    bias1 = tl.where(corrected, 1.0 - mt.power_of(beta1, n), 1.0)
    tl.store(out, grad_factor.to(tl.float32), mask=mask)
    tl.store(out + 1, beta1.to(tl.float32), mask=mask)
    tl.store(out + 2, (1.0 - beta1).to(tl.float32), mask=mask)
    tl.store(out + 3, beta2.to(tl.float32), mask=mask)
    tl.store(out + 4, (1.0 - beta2).to(tl.float32), mask=mask)
    tl.store(out + 5, tl.sqrt(beta2).to(tl.float32), mask=mask)
    tl.store(out + 6, (eps * root2).to(tl.float32), mask=mask)
    tl.store(out + 7, (lr * root2 / bias1).to(tl.float32), mask=mask)
    tl.store(out + 10, (n * mt.DITHER_STEP).to(tl.int32).to(tl.float32, bitcast=True), mask=mask)


@triton.jit(do_not_specialize=["groups", "tensors"])
def adam_prologue(table, scalars, groups, tensors):
    """Advances the steps, and leaves each tensor's scalars for the main kernel."""
    _, columns = mt.columns_of(table, groups, tensors)
    t = tl.program_id(0) * mt.PROLOGUE_TENSORS + tl.arange(0, mt.PROLOGUE_TENSORS)
    mask = t < tensors
    at = (
        table
        + mt.HEADER_WORDS
        + tl.load(columns + mt.GROUP * tensors + t, mask=mask, other=0) * mt.GROUP_WORDS
    )
    lr = mt.read_number(at, mask)
    beta1 = mt.read_fp64(at + 2, mask)
    beta2 = mt.read_fp64(at + 3, mask)
    eps = mt.read_fp64(at + 4, mask)
    weight_decay = mt.read_fp64(at + 5, mask)
    decoupled = mt.read_fp64(at + 6, mask) != 0.0
    maximize = mt.read_fp64(at + 7, mask) != 0.0
    factor = mt.gradient_factor(table)
    run = mt.skipped(table) == 0

    step_at = tl.load(columns + mt.STEP * tensors + t, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(step_at, mask=mask, other=0.0)
    step = tl.where(run, step + 1.0, step)
    tl.store(step_at, step, mask=mask)

    out = scalars + t * mt.SCALARS
    tl.store(out + 8, tl.where(decoupled, 1.0 - lr * weight_decay, 1.0).to(tl.float32), mask=mask)
    tl.store(out + 9, tl.where(decoupled, 0.0, weight_decay).to(tl.float32), mask=mask)
    tl.store(out + 11, tl.where(run, 1.0, 0.0), mask=mask)
    adam_scalars(
        out, mask, lr, beta1, beta2, eps, tl.where(maximize, -factor, factor), step.to(tl.int64), mask | True
    )


@triton.jit
def adam_fields(grads, columns, tensors, tensor, scalars, BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr):
    """What :func:`adam_tile` needs to know of a tensor: addresses, the gradient's scalars, the moments'; the dither."""
    word, s = columns + tensor, scalars + tensor * mt.SCALARS
    addresses = (
        tl.load(word + mt.PARAM * tensors),
        tl.load(grads + tensor),
        tl.load(word + mt.EXP_AVG * tensors),
        tl.load(word + mt.EXP_AVG_SQ * tensors),
        tl.load(word + mt.EXP_AVG_SCALE * tensors).to(tl.pointer_type(tl.float32)),
        tl.load(word + mt.EXP_AVG_SQ_SCALE * tensors).to(tl.pointer_type(tl.float32)),
    )
    of_gradient = tl.load(s), tl.load(s + 9)
    decay2 = tl.load(s + 5) if KIND == POWER else tl.load(s + 3)  # power codes hold w = sqrt(v)
    of_moments = tl.load(s + 1), tl.load(s + 2), decay2, tl.load(s + 4)
    u = dither(tl.arange(0, BLOCK_SIZE), tl.load(s + 10).to(tl.uint32, bitcast=True))[None, :]
    return addresses, of_gradient, of_moments, u


@triton.jit
def adam_tile(
    addresses, of_gradient, of_moments, start, offset, mask, row, row_mask, tables,
    KIND: tl.constexpr, P: tl.constexpr, G: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """p, the new m and v, and where the three are."""
    p_at = float_pointer(addresses[0], start, P, VECTOR)
    g_at = float_pointer(addresses[1], start, G, VECTOR)
    m_at = moment_pointer(addresses[2], start, KIND, True, VECTOR)
    v_at = moment_pointer(addresses[3], start, KIND, False, VECTOR)

    # All loads before all else: they wait together.
    p = tl.load(p_at + offset, mask=mask, other=0.0)
    g = tl.load(g_at + offset, mask=mask, other=0.0)
    m = tl.load(m_at + offset, mask=mask, other=0)
    v = tl.load(v_at + offset, mask=mask, other=0)
    m_scale = load_scale(addresses[4], row, row_mask, KIND)
    v_scale = load_scale(addresses[5], row, row_mask, KIND)

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
    return p, m, v, p_at, m_at, v_at


@triton.jit
def adam_store(
    p, m, v, w, p_at, m_at, v_at, addresses, u, offset, mask, row, row_mask, tables, KIND: tl.constexpr
):
    tl.store(p_at + offset, p.to(p_at.dtype.element_ty), mask=mask)
    store_moment(m, m_at, addresses[4], u, offset, mask, row, row_mask, tables, KIND, True)
    x = w if KIND == POWER else v
    store_moment(x, v_at, addresses[5], u, offset, mask, row, row_mask, tables, KIND, False)


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count"])
def adam_kernel(
    table, scalars, tables, groups, tensors, first, count,
    KIND: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, VECTOR: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    grads, columns = mt.columns_of(table, groups, tensors)
    tensor, first_tile = mt.find_tensor(columns, tensors, first, count, TILES)
    layout = mt.layout_of_tensor(columns + tensor, tensors)
    addresses, of_gradient, of_moments, u = adam_fields(
        grads, columns, tensors, tensor, scalars, BLOCK_SIZE, KIND
    )
    s = scalars + tensor * mt.SCALARS
    eps, step_size, decay = tl.load(s + 6), tl.load(s + 7), tl.load(s + 8)
    tiles = mt.tiles_from(first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)
    for i in range(0, tl.where(tl.load(s + 11) != 0.0, tiles, 0)):  # none where the step is skipped
        start, offset, mask, row, row_mask = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        p, m, v, p_at, m_at, v_at = adam_tile(
            addresses, of_gradient, of_moments, start, offset, mask, row, row_mask, tables, KIND, P, G, VECTOR
        )
        w = tl.math.sqrt_rn(v)
        p = p * decay - step_size * adam_direction(m, w, eps)
        adam_store(p, m, v, w, p_at, m_at, v_at, addresses, u, offset, mask, row, row_mask, tables, KIND)


def adam_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor],
    exp_avg_sq_scales: Sequence[Tensor],
    steps: Sequence[Tensor],
    group: Sequence[int],
    lr: Sequence[Tensor],
    beta1: Sequence[float],
    beta2: Sequence[float],
    eps: Sequence[float],
    weight_decay: Sequence[float],
    decoupled: Sequence[int],
    maximize: Sequence[int],
    codec: Sequence[int],
    block_size: Sequence[int],
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    grad_norm: Tensor | None = None,
    max_grad_norm: float = 0.0,
) -> None:
    """The op behind Adam and AdamW; arguments as in :func:`memkern.reference.adam_step_`."""
    moments = (
        Moment("exp_avgs", exp_avgs, torch.int8, exp_avg_scales),
        Moment("exp_avg_sqs", exp_avg_sqs, torch.uint8, exp_avg_sq_scales),
    )
    hyperparameters = (beta1, beta2, eps, weight_decay, decoupled, maximize)
    args = StepArgs(
        params, grads, moments, steps, (), group, lr, hyperparameters, codec, block_size,
        grad_scale, found_inf, grad_norm, max_grad_norm,
    )  # fmt: skip
    run_step("adam_step_", args, adam_prologue, adam_kernel)
