"""Kernels of memkern::sgd_step_. Order of operations: memkern/reference/sgd.py."""

from __future__ import annotations

import triton
import triton.language as tl

from ..schemas import SGD_STEP, StepArgs
from . import step_table as st
from .block_state import dequantize
from .launch_step import step_in_one_pass
from .lion import lion_addresses, lion_load, lion_store
from .tile import tile_of
from .weights import random_of

# Where a group's hyperparameters are in the table (step_table.py), in words of 8 bytes.
_GROUP_MOMENTUM = st.word_of(SGD_STEP, "momentum")
_DAMPENING = st.word_of(SGD_STEP, "dampening")
_GROUP_WEIGHT_DECAY = st.word_of(SGD_STEP, "weight_decay")
_GROUP_NESTEROV = st.word_of(SGD_STEP, "nesterov")
_MAXIMIZE = st.word_of(SGD_STEP, "maximize")
# Where a tensor's scalars are; step_table.py has those that optimizers share.
MOMENTUM = st.scalar("momentum")
WEIGHT = st.scalar("weight")  # of the gradient in the momentum
WEIGHT_DECAY = st.scalar("weight_decay")
NESTEROV = st.scalar("nesterov")


@triton.jit(do_not_specialize=["groups", "tensors"])
def sgd_prologue(table, scalars, groups, tensors):
    """Increments the tensors' steps and computes their scalars."""
    columns, t, mask = st.tensors_of_program(table, groups, tensors)
    at = st.group_of(table, columns, tensors, t, mask)
    lr = st.read_scalar(at, mask)
    maximize = st.read_fp64(at + _MAXIMIZE, mask) != 0.0
    factor = st.gradient_factor(table)
    step = st.increment_steps(table, columns, tensors, t, mask)
    # As in torch.optim.SGD, the first step's gradient is not dampened.
    dampening = tl.where(step == 1, 0.0, st.read_fp64(at + _DAMPENING, mask))

    out = scalars + t * st.SCALARS
    tl.store(out + st.GRAD_FACTOR, tl.where(maximize, -factor, factor).to(tl.float32), mask=mask)
    tl.store(out + MOMENTUM, st.read_fp64(at + _GROUP_MOMENTUM, mask).to(tl.float32), mask=mask)
    tl.store(out + WEIGHT, (1.0 - dampening).to(tl.float32), mask=mask)
    tl.store(out + WEIGHT_DECAY, st.read_fp64(at + _GROUP_WEIGHT_DECAY, mask).to(tl.float32), mask=mask)
    tl.store(out + st.RATE, lr.to(tl.float32), mask=mask)
    tl.store(out + NESTEROV, tl.where(st.read_fp64(at + _GROUP_NESTEROV, mask) != 0.0, 1.0, 0.0), mask=mask)
    st.store_step_offset(out, step, mask)
    tl.store(out + st.RUN, tl.where(st.skipped(table), 0.0, 1.0), mask=mask)


@triton.jit
def sgd_decayed(p, d, weight_decay):
    if weight_decay != 0.0:
        d = d + weight_decay * p
    return d


@triton.jit
def sgd_momentum(d, m, momentum, weight):
    """The momentum after the step, from the one before and the decayed gradient."""
    return momentum * m + weight * d


@triton.jit
def sgd_parameter(p, d, m, rate, momentum, nesterov):
    return p - rate * tl.where(nesterov, d + momentum * m, m)


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count"])
def sgd_tiles(
    table, scalars, tables, groups, tensors, first, count,
    KIND: tl.constexpr, PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Updates parameters and moments, in a program's tiles of one tensor."""
    tensor, word, grad, layout, first_tile = st.find_work(table, groups, tensors, first, count, TILES)
    s = scalars + tensor * st.SCALARS
    addresses, grad_factor = lion_addresses(word, grad, tensors), tl.load(s + st.GRAD_FACTOR)
    momentum, weight, weight_decay = tl.load(s + MOMENTUM), tl.load(s + WEIGHT), tl.load(s + WEIGHT_DECAY)
    rate, nesterov = tl.load(s + st.RATE), tl.load(s + NESTEROV) != 0.0
    u, r = st.dither_of(s, BLOCK_SIZE), random_of(s, BLOCK_SIZE, PARAM_DTYPE)
    iterations = st.tiles_if(s + st.RUN, first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)
    for i in range(0, iterations):
        tile = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        p, g, m, scale = lion_load(addresses, grad_factor, tile, KIND, PARAM_DTYPE, GRAD_DTYPE, VECTOR)
        d = sgd_decayed(p, g, weight_decay)
        m = sgd_momentum(d, dequantize(m, scale, 1.0, tables, KIND, True), momentum, weight)
        p = sgd_parameter(p, d, m, rate, momentum, nesterov)
        lion_store(p, m, addresses, u, r, tile, tables, KIND, PARAM_DTYPE, VECTOR)


def sgd_step_(args: StepArgs) -> None:
    """The op behind SGD."""
    step_in_one_pass(SGD_STEP, args, sgd_prologue, sgd_tiles)
