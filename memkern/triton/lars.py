"""memkern::lars_step_, in the form of the LAMB paper and in its classic one. Order: memkern/reference/lars.py."""

from __future__ import annotations

import triton
import triton.language as tl

from ..schemas import LARS_STEP, StepArgs
from . import layers as ly
from . import multi_tensor as mt
from .lion import lion_addresses, lion_load, lion_store
from .moment import decayed
from .tiles import tile_of

# Words of a group, beside those of layers.py.
_GROUP_MOMENTUM = mt.word_of(LARS_STEP, "momentum")
_DAMPENING = mt.word_of(LARS_STEP, "dampening")
_WEIGHT_DECAY = mt.word_of(LARS_STEP, "weight_decay")
_GROUP_NESTEROV = mt.word_of(LARS_STEP, "nesterov")
_TRUST_COEFF = mt.word_of(LARS_STEP, "trust_coeff")
_EPS = mt.word_of(LARS_STEP, "eps")
# Words of a layer's scalars beside those of multi_tensor.py and layers.py (LarsScalars in csrc/core/lars.h).
_MOMENTUM = tl.constexpr(1)
_WEIGHT = tl.constexpr(2)
_COUPLED_DECAY = tl.constexpr(3)
_CLASSIC = tl.constexpr(4)
_NESTEROV = tl.constexpr(5)
_GRAD_RATIO = tl.constexpr(12)


@triton.jit(do_not_specialize=["groups", "tensors"])
def lars_prologue(table, scalars, groups, tensors):
    """Leaves each layer's scalars (``LarsScalars`` in csrc/core/lars.h) for the kernels after it."""
    columns, t, mask = mt.tensors_of_program(table, groups, tensors)
    at = mt.group_of(table, columns, tensors, t, mask)
    lr = mt.read_number(at, mask)
    momentum, dampening = mt.read_fp64(at + _GROUP_MOMENTUM, mask), mt.read_fp64(at + _DAMPENING, mask)
    weight_decay = mt.read_fp64(at + _WEIGHT_DECAY, mask)
    classic = mt.read_fp64(at + _TRUST_COEFF, mask) != 0.0
    factor = mt.gradient_factor(table)
    factor = tl.where(mt.read_fp64(at + ly.MAXIMIZE, mask) != 0.0, -factor, factor)
    # As in torch.optim.SGD, the first step's gradient is not dampened.
    dampening = tl.where(ly.next_step(columns, tensors, t, mask) == 1, 0.0, dampening)

    out = scalars + t * mt.SCALARS
    tl.store(out + mt.GRAD_FACTOR, factor.to(tl.float32), mask=mask)
    tl.store(out + _MOMENTUM, momentum.to(tl.float32), mask=mask)
    tl.store(out + _WEIGHT, (1.0 - tl.where(classic, dampening, momentum)).to(tl.float32), mask=mask)
    tl.store(out + _COUPLED_DECAY, weight_decay.to(tl.float32), mask=mask)
    tl.store(out + _CLASSIC, tl.where(classic, 1.0, 0.0), mask=mask)
    tl.store(out + _NESTEROV, tl.where(mt.read_fp64(at + _GROUP_NESTEROV, mask) != 0.0, 1.0, 0.0), mask=mask)
    tl.store(out + _GRAD_RATIO, tl.full(t.shape, 1.0, tl.float32), mask=mask)
    ly.begin_layers(table, columns, tensors, t, mask, out, at, lr, weight_decay)


@triton.jit
def scalars_of_step(s):
    return (
        tl.load(s + mt.GRAD_FACTOR),
        tl.load(s + _MOMENTUM),
        tl.load(s + _WEIGHT),
        tl.load(s + _COUPLED_DECAY),
        tl.load(s + _GRAD_RATIO),
    )


@triton.jit
def lars_load(
    addresses, of_step, tile, tables,
    KIND: tl.constexpr, P: tl.constexpr, G: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """p, the gradient, what of it goes into the moment, and the new moment."""
    grad_factor, momentum, weight, weight_decay, grad_ratio = of_step
    p, g, m, scale = lion_load(addresses, grad_factor, tile, KIND, P, G, VECTOR)
    d = g
    if weight_decay != 0.0:
        d = d + weight_decay * p
    d = grad_ratio * d
    return p, g, d, momentum * decayed(m, scale, 1.0, tables, KIND, True) + weight * d


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count", "programs_before"])
def lars_norms(
    table, scalars, tables, sums, programs_before, groups, tensors, first, count,
    KIND: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, VECTOR: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Sums of squares, in fp64, of the parameter and, classic, of the gradient, else of the moment that will be."""
    tensor, word, grad, layout, first_tile = mt.find_work(table, groups, tensors, first, count, TILES)
    s = scalars + tensor * mt.SCALARS
    addresses, of_step = lion_addresses(word, grad, tensors), scalars_of_step(s)
    classic = tl.load(s + _CLASSIC) != 0.0
    params, updates = tl.zeros((ROWS, BLOCK_SIZE), tl.float64), tl.zeros((ROWS, BLOCK_SIZE), tl.float64)
    for i in range(0, mt.tiles_if(s + ly.ADAPT, first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)):
        tile = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        p, g, _d, m = lars_load(addresses, of_step, tile, tables, KIND, P, G, VECTOR)
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
        at = mt.group_of(table, columns, tensors, tensor, yes)
        lr, weight_decay = mt.read_number(at, yes), mt.read_fp64(at + _WEIGHT_DECAY, yes)
        coeff, eps = mt.read_fp64(at + _TRUST_COEFF, yes), mt.read_fp64(at + _EPS, yes)
        clip = mt.read_fp64(at + ly.TRUST_CLIP, yes) != 0.0
        classic = coeff != 0.0
        found = tl.where(classic, coeff * p_norm / (norm + p_norm * weight_decay + eps), p_norm / norm)
        ratio = ly.both_or_one(p_norm, norm, found)
        ratio = ly.at_most_one(tl.where(classic & clip, ratio / lr, ratio), clip).to(tl.float32)
        tl.store(tl.load(columns + mt.TRUST_RATIO * tensors + tensor).to(tl.pointer_type(tl.float32)), ratio)
        tl.store(s + _GRAD_RATIO, tl.where(classic, ratio, 1.0))
        tl.store(s + ly.RATE, tl.where(classic, lr, lr * ratio.to(tl.float64)).to(tl.float32))


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count"])
def lars_kernel(
    table, scalars, tables, groups, tensors, first, count,
    KIND: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, VECTOR: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    tensor, word, grad, layout, first_tile = mt.find_work(table, groups, tensors, first, count, TILES)
    s = scalars + tensor * mt.SCALARS
    addresses, of_step = lion_addresses(word, grad, tensors), scalars_of_step(s)
    momentum, rate, nesterov = tl.load(s + _MOMENTUM), tl.load(s + ly.RATE), tl.load(s + _NESTEROV) != 0.0
    for i in range(0, mt.tiles_if(s + mt.RUN, first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)):
        tile = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        p, _g, d, m = lars_load(addresses, of_step, tile, tables, KIND, P, G, VECTOR)
        p = p - rate * tl.where(nesterov, d + momentum * m, m)
        lion_store(p, m, addresses, tile, tables, KIND, P, VECTOR)


def lars_step_(args: StepArgs) -> None:
    """The op behind LARS."""
    ly.run_layers(LARS_STEP, args, lars_prologue, lars_norms, lars_ratios, lars_kernel)
