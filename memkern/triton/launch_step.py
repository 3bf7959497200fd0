"""Steps of the optimizers, from their arguments to their launches: in one pass, or in two around the trust ratios."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..quant.layout import row_count
from ..reference.trust import check_trust_ratios
from ..schemas import WEIGHT_STATES, StepArgs, StepOp
from .codec import dynamic_tables
from .launch import TILES, address_of, guard
from .squares import slow_fp64
from .step_args import check_step
from .tensor_table import plan_for
from .trust_ratio import BOTH, FIRST, SECOND, increment_steps_of_tensors


def step_in_one_pass(op: StepOp, args: StepArgs, prologue: Any, kernel: Any) -> None:
    """The prologue, then a launch of ``kernel`` for each combination of its constants that occurs."""
    if not args.params:
        check_step(op, args, torch.device("cpu"))
        return
    device = args.params[0].device
    with guard(device), plan_for(op.name, args, device, lambda: check_step(op, args, device), TILES) as plan:
        table, scalars, tables = plan.memory.table, plan.memory.scalars, dynamic_tables(device)
        plan.prologue(prologue, table, scalars, *plan.sizes)
        for launch in plan.launches:
            launch(kernel, table, scalars, tables, *plan.sizes, launch.first, launch.count)


def _layers(x: Tensor, count: int) -> list[Tensor]:
    """``count`` equal runs of the rows of a dense tensor."""
    if count == 1:
        return [x]
    dim = max((d for d in range(x.dim()) if x.shape[d] != 1), key=x.stride)  # the outermost in memory
    assert x.shape[dim] == row_count(x.shape, x.stride())
    return [*x.chunk(count, dim)]


def by_layer(op: StepOp, args: StepArgs) -> StepArgs:
    """The arguments of a step with an entry for each layer instead of each tensor."""
    counts = [len(ratios) for ratios in args.trust_ratios]  # of each tensor's layers
    # args.moments has an entry per moment and tensor; args.scales and args.weight_states skip tensors without such.
    layers_of_codes = [n for x, n in zip(args.moment(0), counts, strict=True) if x.dtype != torch.float32]
    layers_of_errors = [n for k, n in zip(args.group, counts, strict=True) if args.storage_of(k) in WEIGHT_STATES]

    def split(tensors: Sequence[Tensor]) -> list[Tensor]:
        repeated = counts * (len(tensors) // len(counts))
        return [layer for x, n in zip(tensors, repeated, strict=True) for layer in _layers(x, n)]

    def repeat(values: Sequence[Any]) -> list[Any]:
        return [value for value, n in zip(values, counts, strict=True) for _ in range(n)]

    return args._replace(
        params=split(args.params),
        grads=split(args.grads),
        moments=split(args.moments),
        scales=[
            layer for x, n in zip(args.scales, layers_of_codes * len(op.moments), strict=True) for layer in x.chunk(n)
        ],
        steps=repeat(args.steps),
        trust_ratios=split(args.trust_ratios),
        weight_states=[
            layer for x, n in zip(args.weight_states, layers_of_errors, strict=True) for layer in _layers(x, n)
        ],
        group=repeat(args.group),
    )


def step_in_two_passes(op: StepOp, args: StepArgs, prologue: Any, norms: Any, ratios: Any, update: Any) -> None:
    """The prologue, the steps' increment, then three launches for each combination of constants that occurs.

    With ``args.squares`` one of the passes runs: the first, which fills them (``squares_only``), or the second, which
    reads them.
    """
    device = args.params[0].device if args.params else torch.device("cpu")

    def check() -> None:
        check_step(op, args, device)
        check_trust_ratios(op, args)

    # plan_for calls check() for a new plan only. It is called here, too: by_layer needs valid trust ratios, `squares`
    # may be other ones at each step, and a step without tensors has no plan.
    has_layers = any(x.numel() != 1 for x in args.trust_ratios)
    if has_layers or not args.params or args.squares is not None or args.squares_only:
        check()
    if not args.params:
        return
    if args.squares is not None:
        address_of(args.squares, "squares")
    split = by_layer(op, args) if has_layers else args
    with guard(device), plan_for(op.name, split, device, check, TILES, sums_per_program=2) as plan:
        memory, tables = plan.memory, dynamic_tables(device)
        table, scalars, sums = memory.table, memory.scalars, memory.sums
        slow = slow_fp64(device)
        # Without squares both passes; with squares the first, which fills them (squares_only), or the second.
        one_pass = FIRST if args.squares_only else SECOND
        passes = (BOTH if args.squares is None else one_pass).value
        squares = sums if args.squares is None else args.squares  # any tensor: with both passes it is not used
        plan.prologue(prologue, table, scalars, *plan.sizes, passes)
        if not args.squares_only:
            plan.prologue(increment_steps_of_tensors, table, scalars, *plan.sizes)
        for launch, reduction in zip(plan.launches, plan.reductions, strict=True):
            slots = launch.first, launch.count
            programs = launch.programs_before, launch.programs
            if passes != SECOND.value:
                partial_sums = sums, launch.programs_before
                launch(norms, table, scalars, tables, *partial_sums, *plan.sizes, *slots, SLOW_FP64=slow)
            reduction(ratios, table, scalars, sums, *programs, *plan.sizes, *slots, squares, passes)
            if not args.squares_only:
                launch(update, table, scalars, tables, *plan.sizes, *slots)
