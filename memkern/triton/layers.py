"""Steps in two passes (LAMB, LARS): norms by tile, trust ratios by layer, then the update.

A layer is a tensor of its own in the step's table. Words of its scalars that both optimizers have: RATE and ADAPT;
of its group: TRUST_CLIP, ALWAYS_ADAPT and MAXIMIZE, the last ones of both (:mod:`memkern.schemas`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quant.layout import row_count
from ..reference.trust import check_trust_ratios
from ..schemas import STEP_OPS, StepArgs, StepOp
from . import multi_tensor as mt
from .codec import dynamic_tables
from .launch import guard
from .step_args import check_step
from .table import plan_for

RATE = tl.constexpr(13)
ADAPT = tl.constexpr(14)


def _word_of_all(hyperparameter: str) -> tl.constexpr:
    (word,) = {mt.word_of(op, hyperparameter).value for op in STEP_OPS.values() if op.has_trust_ratios}
    return tl.constexpr(word)


TRUST_CLIP = _word_of_all("trust_clip")
ALWAYS_ADAPT = _word_of_all("always_adapt")
MAXIMIZE = _word_of_all("maximize")
_LANES = tl.constexpr(1024)


@triton.jit
def next_step(columns, tensors, t, mask):
    """The number of the step that begins, which :func:`count_steps` counts."""
    at = tl.load(columns + mt.STEP * tensors + t, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    return (tl.load(at, mask=mask, other=0.0) + 1.0).to(tl.int64)


@triton.jit
def begin_layers(table, columns, tensors, t, mask, out, group, lr, weight_decay):
    """The words that both optimizers have, for a layer that is not adapted."""
    run = mt.skipped(table) == 0
    adapt = (weight_decay != 0.0) | (mt.read_fp64(group + ALWAYS_ADAPT, mask) != 0.0)
    ratio = tl.load(columns + mt.TRUST_RATIO * tensors + t, mask=mask, other=0).to(
        tl.pointer_type(tl.float32)
    )
    tl.store(ratio, tl.where(run, 1.0, tl.load(ratio, mask=mask, other=0.0)), mask=mask)
    tl.store(out + mt.RUN, tl.where(run, 1.0, 0.0), mask=mask)
    tl.store(out + RATE, lr.to(tl.float32), mask=mask)
    tl.store(out + ADAPT, tl.where(run, tl.where(adapt, 1.0, 0.0), 0.0), mask=mask)


@triton.jit
def store_squares(sums, program, params, updates):
    """The sums of a program's tiles."""
    at = sums + 2 * program
    tl.store(at, tl.sum(tl.sum(params, axis=1), axis=0))
    tl.store(at + 1, tl.sum(tl.sum(updates, axis=1), axis=0))


@triton.jit
def norms_of_layer(columns, sums, programs_before, programs, tensors, first, count):
    """A layer, and its parameter's and its update's norm: the partial sums in an order of their own."""
    i = tl.program_id(0)
    slot = columns + first + i
    begin = tl.load(slot + mt.FIRST_PROGRAM * tensors)
    end = tl.where(
        i + 1 < count, tl.load(slot + mt.FIRST_PROGRAM * tensors + 1, mask=i + 1 < count, other=0), programs
    )
    lane = tl.arange(0, _LANES)
    params, updates = tl.zeros((_LANES,), tl.float64), tl.zeros((_LANES,), tl.float64)
    for k in range(begin, end, _LANES):
        at = sums + 2 * (programs_before + k + lane)
        params += tl.load(at, mask=k + lane < end, other=0.0)
        updates += tl.load(at + 1, mask=k + lane < end, other=0.0)
    return (
        tl.load(slot + mt.ORDER * tensors),
        tl.sqrt(tl.sum(params, axis=0)),
        tl.sqrt(tl.sum(updates, axis=0)),
    )


@triton.jit
def both_or_one(p_norm, norm, ratio):
    """``ratio``, or 1 where a norm is 0 or NaN."""
    return tl.where((p_norm > 0.0) & (norm > 0.0), ratio, 1.0)


@triton.jit
def at_most_one(ratio, clip):
    return tl.where(clip & (ratio > 1.0), 1.0, ratio)


@triton.jit(do_not_specialize=["groups", "tensors"])
def count_steps(table, scalars, groups, tensors):
    columns, t, mask = mt.tensors_of_program(table, groups, tensors)
    word = tl.load(columns + mt.COUNTED_STEP * tensors + t, mask=mask, other=0)
    at = word.to(tl.pointer_type(tl.float32))
    step = tl.load(at, mask=word != 0, other=0.0)
    tl.store(at, tl.where(mt.skipped(table) == 0, step + 1.0, step), mask=word != 0)


def _parts(x: Tensor, count: int) -> list[Tensor]:
    """Equal runs of the rows of a dense tensor."""
    if count == 1:
        return [x]
    dim = max((st, d) for d, (st, sz) in enumerate(zip(x.stride(), x.shape, strict=True)) if sz != 1)[1]
    assert x.shape[dim] == row_count(x.shape, x.stride())
    return [*x.chunk(count, dim)]


def by_layer(op: StepOp, args: StepArgs) -> StepArgs:
    """The arguments of a step with an entry for each layer in place of each tensor."""
    counts = [len(ratios) for ratios in args.trust_ratios]
    coded = [n for x, n in zip(args.moment(0), counts, strict=True) if x.dtype != torch.float32]
    several = len(op.moments)

    def split(tensors: Sequence[Tensor]) -> list[Tensor]:
        repeated = counts * (len(tensors) // len(counts))
        return [part for x, n in zip(tensors, repeated, strict=True) for part in _parts(x, n)]

    def repeat(values: Sequence[Any]) -> list[Any]:
        return [value for value, n in zip(values, counts, strict=True) for _ in range(n)]

    return args._replace(
        params=split(args.params),
        grads=split(args.grads),
        moments=split(args.moments),
        scales=[part for x, n in zip(args.scales, coded * several, strict=True) for part in x.chunk(n)],
        steps=repeat(args.steps),
        trust_ratios=split(args.trust_ratios),
        group=repeat(args.group),
    )


def run_layers(op: StepOp, args: StepArgs, prologue: Any, norms: Any, ratios: Any, update: Any) -> None:
    """One step: the prologue, the count of steps, and for each combination of constants that occurs three launches."""
    device = args.params[0].device if args.params else torch.device("cpu")

    def check() -> None:
        check_step(op, args, device)
        check_trust_ratios(op, args)

    several = any(x.numel() != 1 for x in args.trust_ratios)
    if several or not args.params:
        check()
    if not args.params:
        return
    split = by_layer(op, args) if several else args
    with guard(device):
        plan = plan_for(op.name, split, device, check, tiles=8, sums_per_program=2)
        room, tables = plan.room, dynamic_tables(device)
        table, scalars, sums = room.table, room.scalars, room.sums
        plan.prologue(prologue, table, scalars, *plan.sizes)
        plan.prologue(count_steps, table, scalars, *plan.sizes)
        for part, reduction in zip(plan.launches, plan.reductions, strict=True):
            run = part.first, part.members
            part(norms, table, scalars, tables, sums, part.programs_before, *plan.sizes, *run)
            reduction(ratios, table, scalars, sums, part.programs_before, part.programs, *plan.sizes, *run)
            part(update, table, scalars, tables, *plan.sizes, *run)
