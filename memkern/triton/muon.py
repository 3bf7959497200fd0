"""Kernels of memkern::muon_momentum_ and memkern::muon_apply_. Order of operations: memkern/reference/muon.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quant.layout import is_dense
from ..reference.muon import check_muon
from ..schemas import MUON_STEP, StepArgs
from . import step_table as st
from .block_state import dequantize, load_moment, load_scale, store_moment
from .codec import dynamic_tables
from .grad_norm import norm_tiles
from .launch import NORM_TILES, TILES, guard
from .lion import lion_addresses
from .squares import slow_fp64
from .step_args import check_step
from .tensor_table import plan_for
from .tile import load_floats, store_floats, tile_of
from .weights import join_weights, load_weights, random_of, store_weights

# Where a group's hyperparameters are in the table (step_table.py), in words of 8 bytes.
_GROUP_MOMENTUM = st.word_of(MUON_STEP, "momentum")
_GROUP_NESTEROV = st.word_of(MUON_STEP, "nesterov")
_WEIGHT_DECAY = st.word_of(MUON_STEP, "weight_decay")
_MAXIMIZE = st.word_of(MUON_STEP, "maximize")
_RATIO = tl.constexpr(st.LR_WORDS.value + len(MUON_STEP.hyperparameters))  # of muon_apply_'s groups
# Where a tensor's scalars are; step_table.py has those that optimizers share.
_MOMENTUM = st.scalar("momentum")  # the weight of the momentum in the update, with nesterov
_WEIGHT = st.scalar("weight")  # of the gradient in the momentum
_NESTEROV = st.scalar("nesterov")

_LANES = tl.constexpr(1024)  # partial sums that norm_of_each adds at a time


# ---- momentum


@triton.jit(do_not_specialize=["groups", "tensors"])
def muon_prologue(table, scalars, groups, tensors):
    """Increments the tensors' steps and computes their scalars."""
    columns, t, mask = st.tensors_of_program(table, groups, tensors)
    at = st.group_of(table, columns, tensors, t, mask)
    momentum = st.read_fp64(at + _GROUP_MOMENTUM, mask)
    nesterov = st.read_fp64(at + _GROUP_NESTEROV, mask) != 0.0
    maximize = st.read_fp64(at + _MAXIMIZE, mask) != 0.0
    factor = st.gradient_factor(table)
    step = st.increment_steps(table, columns, tensors, t, mask)

    out = scalars + t * st.SCALARS
    tl.store(out + st.GRAD_FACTOR, tl.where(maximize, -factor, factor).to(tl.float32), mask=mask)
    tl.store(out + _MOMENTUM, momentum.to(tl.float32), mask=mask)
    tl.store(out + _WEIGHT, (1.0 - momentum).to(tl.float32), mask=mask)
    tl.store(out + _NESTEROV, tl.where(nesterov, 1.0, 0.0), mask=mask)
    st.store_step_offset(out, step, mask)
    tl.store(out + st.RUN, tl.where(st.skipped(table), 0.0, 1.0), mask=mask)


@triton.jit
def lerp(start, end, weight):
    """start + weight * (end - start), from the nearer end. A weight from 0.5 to 1 less 1 is exact."""
    from_start = tl.abs(weight) < 0.5
    factor = tl.where(from_start, weight, weight - 1.0)
    return tl.math.fma(end - start, factor, tl.where(from_start, start, end))


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count"])
def muon_tiles(
    table, scalars, tables, groups, tensors, first, count,
    KIND: tl.constexpr, PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Updates the momentum, and writes the update, whose address is in the parameter's place."""
    tensor, word, grad, layout, first_tile = st.find_work(table, groups, tensors, first, count, TILES)
    s = scalars + tensor * st.SCALARS
    result, grad, moment, scales, _ = lion_addresses(word, grad, tensors)
    grad_factor = tl.load(s + st.GRAD_FACTOR)
    momentum, weight, nesterov = tl.load(s + _MOMENTUM), tl.load(s + _WEIGHT), tl.load(s + _NESTEROV) != 0.0
    u = st.dither_of(s, BLOCK_SIZE)
    iterations = st.tiles_if(s + st.RUN, first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)
    for i in range(0, iterations):
        tile = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        g = load_floats(grad, tile, GRAD_DTYPE, VECTOR).to(tl.float32)
        m = load_moment(moment, tile, KIND, True, VECTOR)
        scale = load_scale(scales, tile, KIND)
        g = g * grad_factor
        m = lerp(dequantize(m, scale, 1.0, tables, KIND, True), g, weight)
        store_floats(tl.where(nesterov, lerp(g, m, momentum), m), result, tile, PARAM_DTYPE, VECTOR)
        store_moment(m, moment, scales, u, tile, tables, KIND, True, VECTOR)


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count", "programs_before", "programs"])
def norm_of_each(table, sums, programs_before, programs, groups, tensors, first, count):
    """The sum of one tensor's partial sums, in a fixed order, to the address in its TRUST_RATIO column."""
    _, columns = st.columns_of(table, groups, tensors)
    i = tl.program_id(0)
    slot = columns + first + i
    begin = tl.load(slot + st.FIRST_PROGRAM * tensors)
    end = tl.where(i + 1 < count, tl.load(slot + st.FIRST_PROGRAM * tensors + 1, mask=i + 1 < count, other=0), programs)
    lane = tl.arange(0, _LANES)
    total = tl.zeros((_LANES,), tl.float64)
    for k in range(begin, end, _LANES):
        total += tl.load(sums + programs_before + k + lane, mask=k + lane < end, other=0.0)
    tensor = tl.load(slot + st.ORDER * tensors)
    out = tl.load(columns + st.TRUST_RATIO * tensors + tensor).to(tl.pointer_type(tl.float64))
    tl.store(out, tl.where(st.skipped(table), 0.0, tl.sum(total, axis=0)))


def muon_momentum_(updates: Sequence[Tensor], sums: Sequence[Tensor], args: StepArgs) -> None:
    """The op behind the first half of Muon's step."""
    check_muon(args, updates)
    if not args.params:
        return
    device = args.params[0].device
    momentum_args = args._replace(params=updates, weight_states=[], weight_storage=[])
    check = partial(check_step, MUON_STEP, args, device)
    with guard(device):
        with plan_for("muon_momentum_", momentum_args, device, check, TILES) as plan:
            table, scalars, tables = plan.memory.table, plan.memory.scalars, dynamic_tables(device)
            plan.prologue(muon_prologue, table, scalars, *plan.sizes)
            for launch in plan.launches:
                launch(muon_tiles, table, scalars, tables, *plan.sizes, launch.first, launch.count)
        _sum_squares(updates, sums, args, device)


def _sum_squares(updates: Sequence[Tensor], sums: Sequence[Tensor], args: StepArgs, device: torch.device) -> None:
    """The sum of squares of each matrix, or 0 where the step is skipped."""
    matrices: list[Tensor] = []
    totals: list[Tensor] = []
    for u, total in zip(updates, sums, strict=True):
        if not u.numel():
            total.zero_()
        elif u.dim() == 2:
            matrices.append(u if is_dense(u.shape, u.stride()) else u.contiguous())
            totals.append(total)
        else:
            matrices += u.contiguous().flatten(0, -3).unbind()
            totals += total.view(-1).unbind()
    if not matrices:
        return
    of_matrices = StepArgs(params=(), grads=matrices, trust_ratios=totals, found_inf=args.found_inf)
    with plan_for("muon_squares", of_matrices, device, lambda: None, NORM_TILES, sums_per_program=1) as plan:
        table, partials = plan.memory.table, plan.memory.sums
        slow = slow_fp64(device)
        for launch, reduction in zip(plan.launches, plan.reductions, strict=True):
            launch_args = *plan.sizes, launch.first, launch.count
            launch(norm_tiles, table, partials, launch.programs_before, *launch_args, SLOW_FP64=slow)
            reduction(norm_of_each, table, partials, launch.programs_before, launch.programs, *launch_args)


# ---- parameters


@triton.jit(do_not_specialize=["groups", "tensors"])
def muon_apply_prologue(table, scalars, groups, tensors):
    """Computes the tensors' scalars; the momentum's op has incremented the steps."""
    columns, t, mask = st.tensors_of_program(table, groups, tensors)
    at = st.group_of(table, columns, tensors, t, mask)
    lr = st.read_scalar(at, mask)
    weight_decay, ratio = st.read_fp64(at + _WEIGHT_DECAY, mask), st.read_fp64(at + _RATIO, mask)
    step = tl.load(columns + st.STEP * tensors + t, mask=mask, other=0).to(tl.pointer_type(tl.float32))

    out = scalars + t * st.SCALARS
    tl.store(out + st.DECAY, (1.0 - lr * weight_decay).to(tl.float32), mask=mask)
    tl.store(out + st.RATE, (-(lr * ratio)).to(tl.float32), mask=mask)
    st.store_step_offset(out, tl.load(step, mask=mask, other=0.0).to(tl.int64), mask)
    tl.store(out + st.RUN, tl.where(st.skipped(table), 0.0, 1.0), mask=mask)


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count"])
def muon_apply_tiles(
    table, scalars, groups, tensors, first, count,
    KIND: tl.constexpr, PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Updates the parameters by the orthogonalized updates, whose addresses are in the gradients' place."""
    tensor, word, update, layout, first_tile = st.find_work(table, groups, tensors, first, count, TILES)
    s = scalars + tensor * st.SCALARS
    param, update, _, _, weight_state = lion_addresses(word, update, tensors)
    rate, decay = tl.load(s + st.RATE), tl.load(s + st.DECAY)
    r = random_of(s, BLOCK_SIZE, PARAM_DTYPE)
    iterations = st.tiles_if(s + st.RUN, first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)
    for i in range(0, iterations):
        tile = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        p, p_state = load_weights(param, weight_state, tile, PARAM_DTYPE, VECTOR)
        o = load_floats(update, tile, GRAD_DTYPE, VECTOR).to(tl.float32)
        x = join_weights(p, p_state, PARAM_DTYPE)
        x = tl.math.fma(o, tl.zeros_like(o) + rate, x * decay)
        store_weights(x, param, weight_state, r, tile, PARAM_DTYPE, VECTOR)


def muon_apply_(updates: Sequence[Tensor], ratios: Sequence[float], args: StepArgs) -> None:
    """The op behind the second half of Muon's step."""
    check_muon(args, updates)
    if len(ratios) != len(args.params):
        raise ValueError(f"ratios must have {len(args.params)} entries, one per parameter, got {len(ratios)}")
    if not args.params:
        return
    device = args.params[0].device
    # Ratios are the tensors' own, and the orthogonalized updates take the gradients' place.
    apply_args = args.with_groups_of_one(ratios)._replace(grads=updates, moments=[], scales=[])
    check = partial(check_step, MUON_STEP, args, device)
    with guard(device), plan_for("muon_apply_", apply_args, device, check, TILES) as plan:
        table, scalars = plan.memory.table, plan.memory.scalars
        plan.prologue(muon_apply_prologue, table, scalars, *plan.sizes)
        for launch in plan.launches:
            launch(muon_apply_tiles, table, scalars, *plan.sizes, launch.first, launch.count)
