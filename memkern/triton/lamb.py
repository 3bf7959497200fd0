"""memkern::lamb_step_: Adam's moments and direction, a trust ratio for each layer. Order: memkern/reference/lamb.py."""

from __future__ import annotations

import triton
import triton.language as tl

from ..schemas import LAMB_STEP, StepArgs
from . import layers as ly
from . import multi_tensor as mt
from .adam import COUPLED_DECAY, adam_direction, adam_fields, adam_load, adam_scalars, adam_store
from .tiles import tile_of

# Words of a group, beside those of layers.py.
_BETA1 = mt.word_of(LAMB_STEP, "beta1")
_BETA2 = mt.word_of(LAMB_STEP, "beta2")
_EPS = mt.word_of(LAMB_STEP, "eps")
_WEIGHT_DECAY = mt.word_of(LAMB_STEP, "weight_decay")
_DECOUPLED = mt.word_of(LAMB_STEP, "decoupled_decay")
_BIAS_CORRECTION = mt.word_of(LAMB_STEP, "bias_correction")
# A word of a layer's scalars.
_UPDATE_DECAY = tl.constexpr(12)  # weight_decay where it is part of the update, else 0


@triton.jit(do_not_specialize=["groups", "tensors"])
def lamb_prologue(table, scalars, groups, tensors):
    """Leaves each layer's scalars (``LambScalars`` in csrc/core/lamb.h) for the kernels after it."""
    columns, t, mask = mt.tensors_of_program(table, groups, tensors)
    at = mt.group_of(table, columns, tensors, t, mask)
    lr = mt.read_number(at, mask)
    beta1 = mt.read_fp64(at + _BETA1, mask)
    beta2 = mt.read_fp64(at + _BETA2, mask)
    eps = mt.read_fp64(at + _EPS, mask)
    weight_decay = mt.read_fp64(at + _WEIGHT_DECAY, mask)
    decoupled = mt.read_fp64(at + _DECOUPLED, mask) != 0.0
    corrected = mt.read_fp64(at + _BIAS_CORRECTION, mask) != 0.0
    factor = mt.gradient_factor(table)
    factor = tl.where(mt.read_fp64(at + ly.MAXIMIZE, mask) != 0.0, -factor, factor)

    out = scalars + t * mt.SCALARS
    # With lr 1 the step size is the direction's true scale, which the norm needs.
    one = tl.full(t.shape, 1.0, tl.float64)
    adam_scalars(
        out, mask, one, beta1, beta2, eps, factor, ly.next_step(columns, tensors, t, mask), corrected
    )
    tl.store(out + mt.DECAY, tl.where(decoupled, 1.0 - lr * weight_decay, 1.0).to(tl.float32), mask=mask)
    tl.store(out + COUPLED_DECAY, tl.zeros(t.shape, tl.float32), mask=mask)
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
    tensor, word, grad, layout, first_tile = mt.find_work(table, groups, tensors, first, count, TILES)
    s = scalars + tensor * mt.SCALARS
    addresses, of_gradient, of_moments, of_param, _u = adam_fields(word, grad, s, tensors, BLOCK_SIZE, KIND)
    eps, step_size, decay = of_param
    update_decay = tl.load(s + _UPDATE_DECAY)
    params, updates = tl.zeros((ROWS, BLOCK_SIZE), tl.float64), tl.zeros((ROWS, BLOCK_SIZE), tl.float64)
    for i in range(0, mt.tiles_if(s + ly.ADAPT, first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)):
        tile = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        p, m, v = adam_load(addresses, of_gradient, of_moments, tile, tables, KIND, P, G, VECTOR)
        p = p * decay
        update = lamb_update(p, m, tl.math.sqrt_rn(v), eps, step_size, update_decay)
        update = tl.where(tile[2], update, 0.0)  # what does not exist may be 0 / 0
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
        at = mt.group_of(table, columns, tensors, tensor, yes)
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
    tensor, word, grad, layout, first_tile = mt.find_work(table, groups, tensors, first, count, TILES)
    s = scalars + tensor * mt.SCALARS
    addresses, of_gradient, of_moments, of_param, u = adam_fields(word, grad, s, tensors, BLOCK_SIZE, KIND)
    eps, step_size, decay = of_param
    update_decay, rate = tl.load(s + _UPDATE_DECAY), tl.load(s + ly.RATE)
    for i in range(0, mt.tiles_if(s + mt.RUN, first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)):
        tile = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        p, m, v = adam_load(addresses, of_gradient, of_moments, tile, tables, KIND, P, G, VECTOR)
        w = tl.math.sqrt_rn(v)
        p = p * decay
        p = p - rate * lamb_update(p, m, w, eps, step_size, update_decay)
        adam_store(p, m, v, w, addresses, u, tile, tables, KIND, P, VECTOR)


def lamb_step_(args: StepArgs) -> None:
    """The op behind LAMB."""
    ly.run_layers(LAMB_STEP, args, lamb_prologue, lamb_norms, lamb_ratios, lamb_kernel)
