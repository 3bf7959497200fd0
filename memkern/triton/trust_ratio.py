"""What LAMB and LARS share: sums of squares of tiles, norms of layers. Mirror: ``csrc/cuda/trust_ratio.cuh``.

The step's table has an entry for each layer of a tensor. ADAPT: where its scalars say whether there is a ratio.
TRUST_CLIP, ALWAYS_ADAPT, MAXIMIZE: where they are among a group's hyperparameters, the same place in both optimizers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..quant import codec as C
from ..schemas import STEP_OPS
from . import step_table as st

_LEAST_NORM = tl.constexpr(C.LEAST_NORM)
ADAPT = st.scalar("adapt")


def _place_in_both(hyperparameter: str) -> tl.constexpr:
    (place,) = {st.word_of(op, hyperparameter).value for op in STEP_OPS.values() if op.has_trust_ratios}
    return tl.constexpr(place)


TRUST_CLIP = _place_in_both("trust_clip")
ALWAYS_ADAPT = _place_in_both("always_adapt")
MAXIMIZE = _place_in_both("maximize")
# The passes of a step: both, or one of them, with rows of StepArgs' squares (one per layer) written or read.
BOTH = tl.constexpr(0)
FIRST = tl.constexpr(1)
SECOND = tl.constexpr(2)
_LANES = tl.constexpr(1024)  # partial sums that norms_of_layer adds at a time


@triton.jit
def next_step(columns, tensors, t, mask):
    """This step's number, from 1 on. :func:`increment_steps_of_tensors` stores it, once for all layers of a tensor."""
    at = tl.load(columns + st.STEP * tensors + t, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    return (tl.load(at, mask=mask, other=0.0) + 1.0).to(tl.int64)


@triton.jit
def store_layer_scalars(table, columns, tensors, t, mask, out, group, lr, weight_decay, passes):
    """Stores the scalars that both optimizers have, with a trust ratio of 1."""
    run = st.skipped(table) == 0
    adapt = (weight_decay != 0.0) | (st.read_fp64(group + ALWAYS_ADAPT, mask) != 0.0)
    ratio = tl.load(columns + st.TRUST_RATIO * tensors + t, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    writes = tl.where(passes == FIRST, 0, tl.where(run, 1, 0)) != 0
    tl.store(ratio, tl.where(writes, 1.0, tl.load(ratio, mask=mask, other=0.0)), mask=mask)
    tl.store(out + st.RUN, tl.where(run, 1.0, 0.0), mask=mask)
    tl.store(out + st.RATE, lr.to(tl.float32), mask=mask)
    tl.store(out + ADAPT, tl.where(run, tl.where(adapt, 1.0, 0.0), 0.0), mask=mask)


@triton.jit
def store_squares(sums, program, params, updates):
    """Stores the sums of a program's tiles."""
    at = sums + 2 * program
    tl.store(at, tl.sum(tl.sum(params, axis=1), axis=0))
    tl.store(at + 1, tl.sum(tl.sum(updates, axis=1), axis=0))


@triton.jit
def norms_of_layer(columns, sums, programs_before, programs, tensors, first, count, squares, passes):
    """This program's layer, and the norms of its parameter and update: partial sums are added in a fixed order."""
    i = tl.program_id(0)
    slot = columns + first + i
    begin = tl.load(slot + st.FIRST_PROGRAM * tensors)
    end = tl.where(i + 1 < count, tl.load(slot + st.FIRST_PROGRAM * tensors + 1, mask=i + 1 < count, other=0), programs)
    end = tl.where(passes == SECOND, begin, end)
    lane = tl.arange(0, _LANES)
    params, updates = tl.zeros((_LANES,), tl.float64), tl.zeros((_LANES,), tl.float64)
    for k in range(begin, end, _LANES):
        at = sums + 2 * (programs_before + k + lane)
        params += tl.load(at, mask=k + lane < end, other=0.0)
        updates += tl.load(at + 1, mask=k + lane < end, other=0.0)
    tensor = tl.load(slot + st.ORDER * tensors)
    param, update = tl.sum(params, axis=0), tl.sum(updates, axis=0)
    row = squares + 2 * tensor
    if passes == FIRST:
        tl.store(row, param)
        tl.store(row + 1, update)
    if passes == SECOND:
        param, update = tl.load(row), tl.load(row + 1)
    return tensor, tl.sqrt(param), tl.sqrt(update)


@triton.jit
def ratio_or_one(p_norm, norm, ratio):
    """``ratio``, or 1 where a norm is 0 or NaN."""
    return tl.where((p_norm > _LEAST_NORM) & (norm > 0.0), ratio, 1.0)


@triton.jit
def clip_ratio(ratio, clip):
    """``ratio``, but at most 1 where ``clip``."""
    return tl.where(clip & (ratio > 1.0), 1.0, ratio)


@triton.jit(do_not_specialize=["groups", "tensors"])
def increment_steps_of_tensors(table, scalars, groups, tensors):
    """Adds 1 to each tensor's step, which the column COUNTED_STEP has for one of its layers."""
    columns, t, mask = st.tensors_of_program(table, groups, tensors)
    word = tl.load(columns + st.COUNTED_STEP * tensors + t, mask=mask, other=0)
    at = word.to(tl.pointer_type(tl.float32))
    step = tl.load(at, mask=word != 0, other=0.0)
    tl.store(at, tl.where(st.skipped(table) == 0, step + 1.0, step), mask=word != 0)
