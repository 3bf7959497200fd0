"""memkern::lamb_step_: Adam's moments and direction, a trust ratio for each layer. Order: memkern/reference/lamb.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import layers as ly
from . import multi_tensor as mt
from .adam import adam_direction, adam_fields, adam_scalars, adam_store, adam_tile
from .step_args import Moment, StepArgs
from .tiles import tile_of

_UPDATE_DECAY = tl.constexpr(12)  # weight_decay where it is part of the update, else 0


@triton.jit(do_not_specialize=["groups", "tensors"])
def lamb_prologue(table, scalars, groups, tensors):
    """Leaves each layer's scalars (``LambScalars`` in csrc/core/lamb.h) for the kernels after it."""
    _, columns = mt.columns_of(table, groups, tensors)
    t = tl.program_id(0) * mt.PROLOGUE_TENSORS + tl.arange(0, mt.PROLOGUE_TENSORS)
    mask = t < tensors
    at = ly.group_of(table, columns, tensors, t, mask)
    lr = mt.read_number(at, mask)
    beta1, beta2, eps = mt.read_fp64(at + 2, mask), mt.read_fp64(at + 3, mask), mt.read_fp64(at + 4, mask)
    weight_decay = mt.read_fp64(at + 5, mask)
    decoupled = mt.read_fp64(at + 6, mask) != 0.0
    corrected = mt.read_fp64(at + 7, mask) != 0.0
    factor = mt.gradient_factor(table)
    factor = tl.where(mt.read_fp64(at + ly.MAXIMIZE, mask) != 0.0, -factor, factor)

    out = scalars + t * mt.SCALARS
    # With lr 1 the step size is the direction's true scale, which the norm needs.
    one = tl.full(t.shape, 1.0, tl.float64)
    adam_scalars(
        out, mask, one, beta1, beta2, eps, factor, ly.next_step(columns, tensors, t, mask), corrected
    )
    tl.store(out + 8, tl.where(decoupled, 1.0 - lr * weight_decay, 1.0).to(tl.float32), mask=mask)
    tl.store(out + 9, tl.zeros(t.shape, tl.float32), mask=mask)
    tl.store(out + _UPDATE_DECAY, tl.where(decoupled, 0.0, weight_decay).to(tl.float32), mask=mask)
    ly.begin_layers(table, columns, tensors, t, mask, out, at, lr, weight_decay)


@triton.jit
def lamb_update(p, m, w, eps, step_size, update_decay):
    """What the parameter, decayed where that is decoupled, moves along, times -rate."""
    update = step_size * adam_direction(m, w, eps)
    if update_decay != 0.0:
        update = update + update_decay * p
    return update


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count", "programs_before"])
def lamb_norms(
    table, scalars, tables, sums, programs_before, groups, tensors, first, count,
    KIND: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, VECTOR: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Sums of squares, in fp64, of the parameter and of the update that will be; nothing else is written."""
    grads, columns = mt.columns_of(table, groups, tensors)
    tensor, first_tile = mt.find_tensor(columns, tensors, first, count, TILES)
    layout = mt.layout_of_tensor(columns + tensor, tensors)
    addresses, of_gradient, of_moments, _u = adam_fields(
        grads, columns, tensors, tensor, scalars, BLOCK_SIZE, KIND
    )
    s = scalars + tensor * mt.SCALARS
    eps, step_size, decay, update_decay = (
        tl.load(s + 6),
        tl.load(s + 7),
        tl.load(s + 8),
        tl.load(s + _UPDATE_DECAY),
    )
    params, updates = tl.zeros((ROWS, BLOCK_SIZE), tl.float64), tl.zeros((ROWS, BLOCK_SIZE), tl.float64)
    tiles = mt.tiles_from(first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)
    for i in range(0, tl.where(tl.load(s + ly.ADAPT) != 0.0, tiles, 0)):
        start, offset, mask, row, row_mask = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        p, m, v, _p_at, _m_at, _v_at = adam_tile(
            addresses, of_gradient, of_moments, start, offset, mask, row, row_mask, tables, KIND, P, G, VECTOR
        )
        p = p * decay
        update = lamb_update(p, m, tl.math.sqrt_rn(v), eps, step_size, update_decay)
        update = tl.where(mask, update, 0.0)  # what does not exist may be 0 / 0
        params += p.to(tl.float64) * p.to(tl.float64)
        updates += update.to(tl.float64) * update.to(tl.float64)
    ly.store_squares(sums, programs_before + tl.program_id(0), params, updates)


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count", "programs_before", "programs"])
def lamb_ratios(table, scalars, sums, programs_before, programs, groups, tensors, first, count):
    """A program for each layer: its trust ratio, and its rate."""
    _, columns = mt.columns_of(table, groups, tensors)
    tensor, p_norm, norm = ly.norms_of_layer(columns, sums, programs_before, programs, tensors, first, count)
    s = scalars + tensor * mt.SCALARS
    if tl.load(s + ly.ADAPT) != 0.0:
        yes = tensor >= 0
        at = ly.group_of(table, columns, tensors, tensor, yes)
        ratio = ly.both_or_one(p_norm, norm, p_norm / norm)
        ratio = ly.at_most_one(ratio, mt.read_fp64(at + ly.TRUST_CLIP, yes) != 0.0).to(tl.float32)
        tl.store(tl.load(columns + mt.TRUST_RATIO * tensors + tensor).to(tl.pointer_type(tl.float32)), ratio)
        tl.store(s + ly.RATE, (mt.read_number(at, yes) * ratio.to(tl.float64)).to(tl.float32))


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count"])
def lamb_kernel(
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
    eps, step_size, decay, update_decay = (
        tl.load(s + 6),
        tl.load(s + 7),
        tl.load(s + 8),
        tl.load(s + _UPDATE_DECAY),
    )
    rate = tl.load(s + ly.RATE)
    tiles = mt.tiles_from(first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)
    for i in range(0, tl.where(tl.load(s + ly.RUN) != 0.0, tiles, 0)):  # none where the step is skipped
        start, offset, mask, row, row_mask = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        p, m, v, p_at, m_at, v_at = adam_tile(
            addresses, of_gradient, of_moments, start, offset, mask, row, row_mask, tables, KIND, P, G, VECTOR
        )
        w = tl.math.sqrt_rn(v)
        p = p * decay
        p = p - rate * lamb_update(p, m, w, eps, step_size, update_decay)
        adam_store(p, m, v, w, p_at, m_at, v_at, addresses, u, offset, mask, row, row_mask, tables, KIND)


def lamb_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor],
    exp_avg_sq_scales: Sequence[Tensor],
    steps: Sequence[Tensor],
    trust_ratios: Sequence[Tensor],
    group: Sequence[int],
    lr: Sequence[Tensor],
    beta1: Sequence[float],
    beta2: Sequence[float],
    eps: Sequence[float],
    weight_decay: Sequence[float],
    decoupled: Sequence[int],
    bias_correction: Sequence[int],
    trust_clip: Sequence[int],
    always_adapt: Sequence[int],
    layers: Sequence[int],
    maximize: Sequence[int],
    codec: Sequence[int],
    block_size: Sequence[int],
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    grad_norm: Tensor | None = None,
    max_grad_norm: float = 0.0,
) -> None:
    """The op behind LAMB; arguments as in :func:`memkern.reference.lamb_step_`."""
    moments = (
        Moment("exp_avgs", exp_avgs, torch.int8, exp_avg_scales),
        Moment("exp_avg_sqs", exp_avg_sqs, torch.uint8, exp_avg_sq_scales),
    )
    hyperparameters = (
        beta1, beta2, eps, weight_decay, decoupled, bias_correction, trust_clip, always_adapt, maximize,
    )  # fmt: skip
    args = StepArgs(
        params, grads, moments, steps, trust_ratios, group, lr, hyperparameters, codec, block_size,
        grad_scale, found_inf, grad_norm, max_grad_norm,
    )  # fmt: skip
    ly.run_layers("lamb_step_", args, layers, lamb_prologue, lamb_norms, lamb_ratios, lamb_kernel)
