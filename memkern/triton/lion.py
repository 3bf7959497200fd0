"""memkern::lion_step_. Order of operations: memkern/reference/lion.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import multi_tensor as mt
from .launch import TILE
from .moment import load_moment, moment_pointer, store_moment
from .table import Moment, StepArgs, run_step
from .tiles import pointer


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
    at = table + mt.HEADER_WORDS + tl.load(columns + mt.GROUP * tensors + t, mask=mask, other=0) * mt.GROUP_WORDS
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
    ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, VECTOR: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    grads, columns = mt.columns_of(table, groups, tensors)
    tensor, tile = mt.find_tensor(columns, tensors, first, count)
    s = scalars + tensor * mt.SCALARS
    if tl.load(s + 7) != 0.0:
        start, offset, mask, row, row_mask = mt.tile_of_tensor(
            columns, tensors, tensor, tile, ROWS, BLOCK_SIZE, VECTOR, FLAT
        )
        word = columns + tensor
        params = pointer(tl.load(word + mt.PARAM * tensors), P, VECTOR) + start
        gradients = pointer(tl.load(grads + tensor), G, VECTOR) + start
        exp_avg = moment_pointer(tl.load(word + mt.EXP_AVG * tensors), KIND, True, VECTOR) + start
        scale = tl.load(word + mt.EXP_AVG_SCALE * tensors).to(tl.pointer_type(tl.float32))

        p = tl.load(params + offset, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(gradients + offset, mask=mask, other=0.0).to(tl.float32) * tl.load(s)
        m = load_moment(exp_avg, scale, 1.0, offset, mask, row, row_mask, tables, KIND, True)
        update = sign(tl.load(s + 1) * m + tl.load(s + 2) * g)
        p = p * tl.load(s + 6) - tl.load(s + 5) * update
        m = tl.load(s + 3) * m + tl.load(s + 4) * g
        tl.store(params + offset, p.to(P), mask=mask)
        store_moment(m, exp_avg, scale, 0.5, offset, mask, row, row_mask, tables, KIND, True)


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
        params, grads, moments, None, group, lr, hyperparameters, codec, block_size,
        grad_scale, found_inf, grad_norm, max_grad_norm,
    )  # fmt: skip
    run_step("lion_step_", args, lion_prologue, lion_kernel, TILE)
