"""memkern::lion_step_. Order of operations: memkern/reference/lion.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import multi_tensor as mt
from .moment import decayed, load_scale, moment_pointer, store_moment
from .step_args import Moment, StepArgs
from .table import run_step
from .tiles import float_pointer, tile_of


@triton.jit
def sign(x):
    """-1, 0 or 1; NaN stays NaN, and so does the sign of zero."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit(do_not_specialize=["groups", "tensors"])
def lion_prologue(table, scalars, groups, tensors):
    """Leaves each tensor's scalars (``LionScalars`` in csrc/core/lion.h) for the main kernel."""
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
    weight_decay = mt.read_fp64(at + 4, mask)
    maximize = mt.read_fp64(at + 5, mask) != 0.0
    factor = mt.gradient_factor(table)

    out = scalars + t * mt.SCALARS
    tl.store(out, tl.where(maximize, -factor, factor).to(tl.float32), mask=mask)
    tl.store(out + 1, beta1.to(tl.float32), mask=mask)
    tl.store(out + 2, (1.0 - beta1).to(tl.float32), mask=mask)
    tl.store(out + 3, beta2.to(tl.float32), mask=mask)
    tl.store(out + 4, (1.0 - beta2).to(tl.float32), mask=mask)
    tl.store(out + 5, lr.to(tl.float32), mask=mask)
    tl.store(out + 6, (1.0 - lr * weight_decay).to(tl.float32), mask=mask)
    tl.store(out + 7, tl.where(mt.skipped(table), 0.0, 1.0), mask=mask)


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count"])
def lion_kernel(
    table, scalars, tables, groups, tensors, first, count,
    KIND: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, VECTOR: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    grads, columns = mt.columns_of(table, groups, tensors)
    tensor, first_tile = mt.find_tensor(columns, tensors, first, count, TILES)
    word, s = columns + tensor, scalars + tensor * mt.SCALARS
    layout = mt.layout_of_tensor(word, tensors)
    params = tl.load(word + mt.PARAM * tensors)
    gradients = tl.load(grads + tensor)
    exp_avg = tl.load(word + mt.EXP_AVG * tensors)
    scales = tl.load(word + mt.EXP_AVG_SCALE * tensors).to(tl.pointer_type(tl.float32))
    grad_factor = tl.load(s)
    beta1, one_minus_beta1 = tl.load(s + 1), tl.load(s + 2)
    beta2, one_minus_beta2 = tl.load(s + 3), tl.load(s + 4)
    lr, decay = tl.load(s + 5), tl.load(s + 6)
    tiles = mt.tiles_from(first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)
    for i in range(0, tl.where(tl.load(s + 7) != 0.0, tiles, 0)):  # none where the step is skipped
        start, offset, mask, row, row_mask = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        p_at = float_pointer(params, start, P, VECTOR)
        g_at = float_pointer(gradients, start, G, VECTOR)
        m_at = moment_pointer(exp_avg, start, KIND, True, VECTOR)

        p = tl.load(p_at + offset, mask=mask, other=0.0)
        g = tl.load(g_at + offset, mask=mask, other=0.0)
        m = tl.load(m_at + offset, mask=mask, other=0)
        scale = load_scale(scales, row, row_mask, KIND)

        p = p.to(tl.float32)
        g = g.to(tl.float32) * grad_factor
        m = decayed(m, scale, 1.0, tables, KIND, True)
        p = p * decay - lr * sign(beta1 * m + one_minus_beta1 * g)
        m = beta2 * m + one_minus_beta2 * g
        tl.store(p_at + offset, p.to(p_at.dtype.element_ty), mask=mask)
        store_moment(m, m_at, scales, 0.5, offset, mask, row, row_mask, tables, KIND, True)


def lion_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor],
    group: Sequence[int],
    lr: Sequence[Tensor],
    beta1: Sequence[float],
    beta2: Sequence[float],
    weight_decay: Sequence[float],
    maximize: Sequence[int],
    codec: Sequence[int],
    block_size: Sequence[int],
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    grad_norm: Tensor | None = None,
    max_grad_norm: float = 0.0,
) -> None:
    """The op behind Lion; arguments as in :func:`memkern.reference.lion_step_`."""
    moments = (Moment("exp_avgs", exp_avgs, torch.int8, exp_avg_scales),)
    hyperparameters = (beta1, beta2, weight_decay, maximize)
    args = StepArgs(
        params, grads, moments, None, (), group, lr, hyperparameters, codec, block_size,
        grad_scale, found_inf, grad_norm, max_grad_norm,
    )  # fmt: skip
    run_step("lion_step_", args, lion_prologue, lion_kernel)
