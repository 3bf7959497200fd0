"""Kernels of memkern::grad_norm_: the global norm of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quant.layout import FLOATS, is_dense
from ..schemas import StepArgs
from . import step_table as st
from .launch import NORM_TILES, OPTIONS, address_of, guard
from .squares import add_squares, slow_fp64, zero_squares
from .tensor_table import plan_for
from .tile import load_floats, tile_of

_SUMS = tl.constexpr(4096)  # partial sums that norm_total adds at a time


@triton.jit(do_not_specialize=["groups", "tensors", "first", "count", "programs_before"])
def norm_tiles(
    table, sums, programs_before, groups, tensors, first, count,
    KIND: tl.constexpr, PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr, FLAT: tl.constexpr,
    SLOW_FP64: tl.constexpr,
):  # fmt: skip
    """The sum of squares of a program's tiles, in fp64."""
    _, _, grad, layout, first_tile = st.find_work(table, groups, tensors, first, count, TILES)
    total = zero_squares(ROWS, BLOCK_SIZE, VECTOR, SLOW_FP64)
    iterations = st.tiles_from(first_tile, layout, TILES, ROWS, BLOCK_SIZE, FLAT)
    for i in range(0, iterations):
        tile = tile_of(first_tile + i, layout, ROWS, BLOCK_SIZE, VECTOR, FLAT)
        total = add_squares(total, load_floats(grad, tile, GRAD_DTYPE, VECTOR).to(tl.float32), SLOW_FP64)
    tl.store(sums + programs_before + tl.program_id(0), tl.sum(tl.sum(total, axis=1), axis=0))


@triton.jit(do_not_specialize=["count"])
def norm_total(table, sums, norm, count):
    """norm = sqrt(sum of the partial sums) / grad_scale, added in the same order whatever the grid."""
    lane = tl.arange(0, _SUMS)
    total = tl.zeros((_SUMS,), tl.float64)
    for i in range(0, count, _SUMS):
        total += tl.load(sums + i + lane, mask=i + lane < count, other=0.0)
    tl.store(norm, tl.sqrt(tl.sum(total, axis=0)) * st.gradient_factor(table))


def _check(norm: Tensor, grads: Sequence[Tensor]) -> None:
    for i, g in enumerate(grads):
        if g.dtype not in FLOATS:
            raise TypeError(f"grads[{i}] must be float32, bfloat16 or float16, got {g.dtype}")
        if g.device != norm.device:
            raise ValueError(f"grads[{i}] must be on {norm.device} like norm, got {g.device}")


def grad_norm_(norm: Tensor, grads: Sequence[Tensor], grad_scale: Tensor | None = None) -> None:
    """The op behind ``max_grad_norm``: norm = sqrt(sum of g^2 over all tensors) / grad_scale, in fp64."""
    if norm.numel() != 1 or norm.dtype != torch.float64:
        raise ValueError(f"norm must be float64 of one element, got {norm.dtype} of shape {tuple(norm.shape)}")
    address_of(norm, "norm")
    device = norm.device
    grads = [g if is_dense(g.shape, g.stride()) else g.contiguous() for g in grads]
    args = StepArgs(params=(), grads=grads, grad_scale=grad_scale)
    check = partial(_check, norm, grads)
    with guard(device), plan_for("grad_norm_", args, device, check, NORM_TILES, sums_per_program=1) as plan:
        table, sums = plan.memory.table, plan.memory.sums
        slow = slow_fp64(device)
        for launch in plan.launches:
            launch_args = launch.programs_before, *plan.sizes, launch.first, launch.count
            launch(norm_tiles, table, sums, *launch_args, SLOW_FP64=slow)
        norm_total[(1,)](table, sums, norm, len(sums), **OPTIONS)
