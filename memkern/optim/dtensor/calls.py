"""Calls ops on a rank's local tensors, after the reductions over ranks that a step of shards needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import _ops, reference
from ...reference.shard import ShardArgs, ShardLayout
from ...schemas import StepArgs, StepOp
from ..call import Call
from ..trust_bounds import clamp_norms, new_squares
from .blocks import layout_of_shard, reduce_magnitudes
from .collectives import all_reduce
from .shards import Ranks, is_dtensor, local, locals_of


def match_placements(g: Tensor, p: Tensor) -> Tensor:
    """A gradient with its parameter's placements; redistributed where it has others."""
    spec = getattr(p, "_spec", None)  # a DTensor's mesh, placements, shape and dtype
    if spec is not None and getattr(g, "_spec", None) is spec:
        return g  # fully_shard's gradients share it; comparing placements takes four times as long
    if is_dtensor(g) and is_dtensor(p) and g.device_mesh == p.device_mesh:
        return g if g.placements == p.placements else g.redistribute(placements=p.placements)
    if is_dtensor(g) or is_dtensor(p):
        raise RuntimeError(
            f"a gradient must be a DTensor of its parameter's mesh where that is one, got {type(g).__name__} for a "
            f"{type(p).__name__} of shape {tuple(p.shape)}"
        )
    return g


def local_grads(grads: Sequence[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
    """This rank's parts of gradients."""
    return locals_of([match_placements(g, p) for g, p in zip(grads, params, strict=True)])


def local_args(args: StepArgs) -> StepArgs:
    """The arguments with this rank's local tensors."""
    return args._replace(
        params=locals_of(args.params),
        grads=local_grads(args.grads, args.params),
        moments=locals_of(args.moments),
        # Scales of an empty shard are of shape (0, k). The ops take those of an empty tensor: of shape (0,).
        scales=[s if s.numel() else s.reshape(0) for s in locals_of(args.scales)],
        weight_states=locals_of(args.weight_states),
    )


def step_with_reduction(calls: Sequence[Call], groups: Sequence[Mapping[str, Any]]) -> None:
    """Steps shards after the reductions over ranks that they need. All calls are of one op.

    First the sums of squares of layers are reduced, for trust ratios. Then, with these, come the largest magnitudes of
    blocks that lie on several ranks, which are known after a step on copies. Last is the step itself.

    groups: the optimizer's.
    """
    op = calls[0].op
    steps: list[tuple[StepArgs, Callable[[StepArgs], None]]] = []  # for each call, local arguments and what steps them
    cut: dict[int, ShardLayout] = {}  # by a call's index, the layout of a shard with parts of blocks
    for i, call in enumerate(calls):
        args = local_args(call.args)
        if not call.by_reference:
            steps.append((args, partial(_ops.step_, op)))
            continue
        (p,), (group,) = call.args.params, args.group  # the plan makes a call by itself of each shard on the reference
        layer_count = len(args.trust_ratios[0]) if op.has_trust_ratios else 1
        layout = layout_of_shard(p, args.block_size[group], layer_count, coded=bool(args.scales))
        args = args._replace(scales=[s.view(layout.scale_shape) for s in args.scales])
        steps.append((args, partial(_run_on_reference, op, layout)))
        if layout.cut:
            cut[i] = layout
    if op.has_trust_ratios:
        steps = [(args._replace(squares=new_squares(args)), run) for args, run in steps]
        for args, run in steps:
            run(args._replace(squares_only=True))
        _reduce_squares([args for args, _ in steps], [call.ranks for call in calls])
        for args, _ in steps:
            clamp_norms(args, groups)
    for i in cut:
        args, run = steps[i]
        run(with_copies(args))
    reduce_magnitudes([layout.magnitudes for layout in cut.values()], [calls[i].ranks[0] for i in cut])
    for args, run in steps:
        run(args)
    torch.autograd.graph.increment_version([p for call in calls for x in call.args.params for p in (x, local(x))])


def _run_on_reference(op: StepOp, layout: ShardLayout, args: StepArgs) -> None:
    """Runs the reference's step of one shard."""
    layout.magnitudes.begin_run()
    getattr(reference, op.name)(ShardArgs.of(args, [layout]))


def _reduce_squares(parts: Sequence[StepArgs], ranks: Sequence[Sequence[Ranks | None]]) -> None:
    """Replaces ``squares`` of each of the arguments by the sums over the ranks that hold its tensors.

    ranks: for each of the arguments, those of its tensors. ``squares`` has a row for each layer of each tensor.
    """
    sums: list[tuple[Tensor, list[int], Tensor]] = []  # squares, rows of them on the same ranks, and these rows' values
    owners_of_sums: list[Ranks] = []
    for args, owners_of_tensors in zip(parts, ranks, strict=True):
        squares = args.squares
        assert squares is not None
        if len({*map(id, owners_of_tensors)}) == 1:  # the usual case; equal ranks are one object
            rows_of = {owners_of_tensors[0]: [*range(len(squares))]}
        else:
            rows_of, first = {}, 0
            for ratios, owners in zip(args.trust_ratios, owners_of_tensors, strict=True):
                rows_of.setdefault(owners, []).extend(range(first, first + ratios.numel()))
                first += ratios.numel()
        for owners, rows in rows_of.items():
            if owners is not None:
                sums.append((squares, rows, squares if len(rows_of) == 1 else squares[rows]))
                owners_of_sums.append(owners)
    all_reduce("sum", [x for _, _, x in sums], owners_of_sums)
    for squares, rows, x in sums:
        if x is not squares:
            squares[rows] = x


def with_copies(args: StepArgs) -> StepArgs:
    """The arguments with copies of the tensors that a step changes."""
    changed = ("params", "moments", "scales", "steps", "trust_ratios", "weight_states")
    copies: dict[str, Any] = {name: [x.clone() for x in getattr(args, name)] for name in changed}
    return args._replace(**copies)
