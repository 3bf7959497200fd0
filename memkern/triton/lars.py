"""memkern::lars_step_, in the form of the LAMB paper and in its classic one. Order: memkern/reference/lars.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import layers as ly
from . import multi_tensor as mt
from .moment import decayed, load_scale, moment_pointer, store_moment
from .step_args import Moment, StepArgs
from .tiles import float_pointer, tile_of

# Words of a group, and of a layer's scalars.
_WEIGHT_DECAY, _TRUST_COEFF, _EPS = tl.constexpr(4), tl.constexpr(6), tl.constexpr(7)
_CLASSIC, _NESTEROV = tl.constexpr(4), tl.constexpr(5)


@triton.jit(do_not_specialize=["groups", "tensors"])
def lars_prologue(table, scalars, groups, tensors):
    """Leaves each layer's scalars (``LarsScalars`` in csrc/core/lars.h) for the kernels after it."""
    _, columns = mt.columns_of(table, groups, tensors)
    t = tl.program_id(0) * mt.PROLOGUE_TENSORS + tl.arange(0, mt.PROLOGUE_TENSORS)
    mask = t < tensors
    at = ly.group_of(table, columns, tensors, t, mask)
    lr = mt.read_number(at, mask)
    momentum, dampening = mt.read_fp64(at + 2, mask), mt.read_fp64(at + 3, mask)
    weight_decay = mt.read_fp64(at + _WEIGHT_DECAY, mask)
    classic = mt.read_fp64(at + _TRUST_COEFF, mask) != 0.0
    factor = mt.gradient_factor(table)
    factor = tl.where(mt.read_fp64(at + ly.MAXIMIZE, mask) != 0.0, -factor, factor)
    # As in torch.optim.SGD, the first step's gradient is not dampened.
    dampening = tl.where(ly.next_step(columns, tensors, t, mask) == 1, 0.0, dampening)

    out = scalars + t * mt.SCALARS
    tl.store(out, factor.to(tl.float32), mask=mask)
    tl.store(out + 1, momentum.to(tl.float32), mask=mask)
    tl.store(out + 2, (1.0 - tl.where(classic, dampening, momentum)).to(tl.float32), mask=mask)
    tl.store(out + 3, weight_decay.to(tl.float32), mask=mask)
    tl.store(out + _CLASSIC, tl.where(classic, 1.0, 0.0), mask=mask)
    tl.store(out + _NESTEROV, tl.where(mt.read_fp64(at + 5, mask) != 0.0, 1.0, 0.0), mask=mask)
    tl.store(out + ly.GRAD_RATIO, tl.full(t.shape, 1.0, tl.float32), mask=mask)
    ly.begin_layers(table, columns, tensors, t, mask, out, at, lr, weight_decay)


@triton.jit
def lars_fields(grads, columns, tensors, tensor, scalars):
    """What :func:`lars_tile` needs to know of a layer: addresses and scalars."""
    word, s = columns + tensor, scalars + tensor * mt.SCALARS
    addresses = (
        tl.load(word + mt.PARAM * tensors),
        tl.load(grads + tensor),
        tl.load(word + mt.EXP_AVG * tensors),
        tl.load(word + mt.EXP_AVG_SCALE * tensors).to(tl.pointer_type(tl.float32)),
    )
    of_step = tl.load(s), tl.load(s + 1), tl.load(s + 2), tl.load(s + 3), tl.load(s + ly.GRAD_RATIO)
    return addresses, of_step


@triton.jit
def lars_tile(
    addresses, of_step, start, offset, mask, row, row_mask, tables,
    KIND: tl.constexpr, P: tl.constexpr, G: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """p, the gradient, what of it goes into the moment, the new moment, and where p and the moment are."""
    p_at = float_pointer(addresses[0], start, P, VECTOR)
    g_at = float_pointer(addresses[1], start, G, VECTOR)
    m_at = moment_pointer(addresses[2], start, KIND, True, VECTOR)

    p = tl.load(p_at + offset, mask=mask, other=0.0)
    g = tl.load(g_at + offset, mask=mask, other=0.0)
    m = tl.load(m_at + offset, mask=mask, other=0)
    scale = load_scale(addresses[3], row, row_mask, KIND)

    grad_factor, momentum, weight, weight_decay, grad_ratio = of_step
    p = p.to(tl.float32)
    g = g.to(tl.float32) * grad_factor
    d = g
    if weight_decay != 0.0:
        d = d + weight_decay * p
    d = grad_ratio * d
    m = momentum * decayed(m, scale, 1.0, tables, KIND, True) + weight * d
    return p, g, d, m, p_at, m_at


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count", "programs_before"])
def lars_norms(
    table, scalars, tables, sums, programs_before, groups, tensors, first, count,
    KIND: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, VECTOR: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Sums of squares, in fp64, of the parameter and, classic, of the gradient, else of the moment that will be."""
    grads, columns = mt.columns_of(table, groups, tensors)
    tensor, first_tile = mt.find_tensor(columns, tensors, first, count, TILES)
    layout = mt.layout_of_tensor(columns + tensor, tensors)
    addresses, of_step = lars_fields(grads, columns, tensors, tensor, scalars)
    s = scalars + tensor * mt.SCALARS
    classic = tl.load(s + _CLASSIC) != 0.0
    params, updates = tl.zeros((ROWS, BLOCK_SIZE), tl.float64), tl.zeros((ROWS, BLOCK_SIZE), tl.float64)
    tiles = mt.tiles_from(first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)
    for i in range(0, tl.where(tl.load(s + ly.ADAPT) != 0.0, tiles, 0)):
        start, offset, mask, row, row_mask = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        p, g, _d, m, _p_at, _m_at = lars_tile(
            addresses, of_step, start, offset, mask, row, row_mask, tables, KIND, P, G, VECTOR
        )
        update = tl.where(classic, g, m).to(tl.float64)
        params += p.to(tl.float64) * p.to(tl.float64)
        updates += update * update
    ly.store_squares(sums, programs_before + tl.program_id(0), params, updates)


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count", "programs_before", "programs"])
def lars_ratios(table, scalars, sums, programs_before, programs, groups, tensors, first, count):
    """A program for each layer: its trust ratio, and what that multiplies."""
    _, columns = mt.columns_of(table, groups, tensors)
    tensor, p_norm, norm = ly.norms_of_layer(columns, sums, programs_before, programs, tensors, first, count)
    s = scalars + tensor * mt.SCALARS
    if tl.load(s + ly.ADAPT) != 0.0:
        yes = tensor >= 0
        at = ly.group_of(table, columns, tensors, tensor, yes)
        lr, weight_decay = mt.read_number(at, yes), mt.read_fp64(at + _WEIGHT_DECAY, yes)
        coeff, eps = mt.read_fp64(at + _TRUST_COEFF, yes), mt.read_fp64(at + _EPS, yes)
        clip = mt.read_fp64(at + ly.TRUST_CLIP, yes) != 0.0
        classic = coeff != 0.0
        found = tl.where(classic, coeff * p_norm / (norm + p_norm * weight_decay + eps), p_norm / norm)
        ratio = ly.both_or_one(p_norm, norm, found)
        ratio = ly.at_most_one(tl.where(classic & clip, ratio / lr, ratio), clip).to(tl.float32)
        tl.store(tl.load(columns + mt.TRUST_RATIO * tensors + tensor).to(tl.pointer_type(tl.float32)), ratio)
        tl.store(s + ly.GRAD_RATIO, tl.where(classic, ratio, 1.0))
        tl.store(s + ly.RATE, tl.where(classic, lr, lr * ratio.to(tl.float64)).to(tl.float32))


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count"])
def lars_kernel(
    table, scalars, tables, groups, tensors, first, count,
    KIND: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, VECTOR: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    grads, columns = mt.columns_of(table, groups, tensors)
    tensor, first_tile = mt.find_tensor(columns, tensors, first, count, TILES)
    layout = mt.layout_of_tensor(columns + tensor, tensors)
    addresses, of_step = lars_fields(grads, columns, tensors, tensor, scalars)
    s = scalars + tensor * mt.SCALARS
    momentum, rate, nesterov = tl.load(s + 1), tl.load(s + ly.RATE), tl.load(s + _NESTEROV) != 0.0
    tiles = mt.tiles_from(first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)
    for i in range(0, tl.where(tl.load(s + ly.RUN) != 0.0, tiles, 0)):  # none where the step is skipped
        start, offset, mask, row, row_mask = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        p, _g, d, m, p_at, m_at = lars_tile(
            addresses, of_step, start, offset, mask, row, row_mask, tables, KIND, P, G, VECTOR
        )
        p = p - rate * tl.where(nesterov, d + momentum * m, m)
        tl.store(p_at + offset, p.to(p_at.dtype.element_ty), mask=mask)
        store_moment(m, m_at, addresses[3], 0.5, offset, mask, row, row_mask, tables, KIND, True)


def lars_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor],
    steps: Sequence[Tensor],
    trust_ratios: Sequence[Tensor],
    group: Sequence[int],
    lr: Sequence[Tensor],
    momentum: Sequence[float],
    dampening: Sequence[float],
    weight_decay: Sequence[float],
    nesterov: Sequence[int],
    trust_coeff: Sequence[float],
    eps: Sequence[float],
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
    """The op behind LARS; arguments as in :func:`memkern.reference.lars_step_`."""
    moments = (Moment("exp_avgs", exp_avgs, torch.int8, exp_avg_scales),)
    hyperparameters = (
        momentum, dampening, weight_decay, nesterov, trust_coeff, eps, trust_clip, always_adapt, maximize,
    )  # fmt: skip
    args = StepArgs(
        params, grads, moments, steps, trust_ratios, group, lr, hyperparameters, codec, block_size,
        grad_scale, found_inf, grad_norm, max_grad_norm,
    )  # fmt: skip
    ly.run_layers("lars_step_", args, layers, lars_prologue, lars_norms, lars_ratios, lars_kernel)
