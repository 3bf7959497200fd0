"""A step of shards, and what ranks compute together for it: norms, scales of blocks that several of them have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _ops, reference
from ..quant.codec import CODECS
from ..quant.layout import BlockLayout, block_layout, layout_of
from ..reference import blockwise
from ..reference.blockwise import code_blocks, decode
from ..reference.shard import Shard, ShardArgs, ShardLayout
from ..reference.state import encode_moment
from ..schemas import StepArgs, StepOp
from .sharding import Ranks, cuts_blocks, is_dtensor, local, locals_of, new_packed, new_scale, ranks_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh

    from .base import BlockwiseOptimizer

# ---- collectives


def all_reduce(kind: str, values: Sequence[Tensor], ranks: Sequence[Ranks | None]) -> None:
    """Reduces each value, in place, over the ranks that have other elements of the tensor it is of.

    One collective for each dimension of a mesh along which something is sharded, for all values together.
    """
    of_mesh: dict[DeviceMesh, list[int]] = {}
    for i, found in enumerate(ranks):
        if found is not None:
            of_mesh.setdefault(found[0], []).append(i)
    for mesh, own in of_mesh.items():
        parts = [values[i].reshape(-1).double() for i in own]
        sizes = [x.numel() for x in parts]
        flat = torch.cat(parts)
        dims = [ranks[i][1] for i in own]  # type: ignore[index]
        for k in sorted({k for of_one in dims for k in of_one}):
            if kind == "sum" and mesh.get_local_rank(k) != 0:
                for x, of_one in zip(flat.split(sizes), dims, strict=True):
                    if k not in of_one:
                        x.zero_()  # every rank along k has it: the first one's counts
            op = dist.ReduceOp.SUM if kind == "sum" else dist.ReduceOp.MAX
            dist.all_reduce(flat, op, group=mesh.get_group(k))
        for i, x in zip(own, flat.split(sizes), strict=True):
            values[i].copy_(x.reshape(values[i].shape))


def reduced_found_inf(optimizer: BlockwiseOptimizer, params: Sequence[Tensor]) -> None:
    """A GradScaler's found_inf of all ranks: all skip the step, or none."""
    found = getattr(optimizer, "found_inf", None)
    if found is None:
        return
    found = found.clone()
    dims: dict[DeviceMesh, set[int]] = {}
    for p in params:
        if ranks := ranks_of(p):
            dims.setdefault(ranks[0], set()).update(ranks[1])
    for mesh, own in dims.items():
        all_reduce("max", [found], [(mesh, tuple(sorted(own)))])
    optimizer.found_inf = found


def grad_norm(args: StepArgs, ranks: Sequence[Ranks | None]) -> Tensor:
    """The norm of all gradients, fp64, unscaled, of tensors of which these ranks have others' elements."""
    of_ranks: dict[Ranks | None, list[Tensor]] = {}
    for g, found in zip(args.grads, ranks, strict=True):
        of_ranks.setdefault(found, []).append(g)
    device = args.grads[0].device
    squares = []
    for grads in of_ranks.values():
        norm = torch.zeros((), dtype=torch.float64, device=device)
        if all(g.dtype != torch.float64 and g.device == device for g in grads):
            _ops.grad_norm_(norm, grads, args.grad_scale)
        else:
            norms = [torch.linalg.vector_norm(g, dtype=torch.float64).to(device) for g in grads]
            norm = torch.linalg.vector_norm(torch.stack(norms))
            if args.grad_scale is not None:
                norm = norm / args.grad_scale.to(device).double().reshape(())
        squares.append(norm.square())
    all_reduce("sum", squares, [*of_ranks])
    return torch.stack(squares).sum().sqrt()


# ---- step


def _matching(g: Tensor, p: Tensor) -> Tensor:
    """A gradient with its parameter's placements."""
    if getattr(g, "_spec", None) is getattr(p, "_spec", g):
        return g  # so are fully_shard's, and looking closer takes four times as long
    if is_dtensor(g) and is_dtensor(p) and g.device_mesh == p.device_mesh:
        return g if g.placements == p.placements else g.redistribute(placements=p.placements)
    if is_dtensor(g) or is_dtensor(p):
        raise RuntimeError(
            f"a gradient must be a DTensor of its parameter's mesh where that is one, got {type(g).__name__} for a "
            f"{type(p).__name__} of shape {tuple(p.shape)}"
        )
    return g


def local_args(args: StepArgs) -> StepArgs:
    """The step of what this rank has."""
    grads = [_matching(g, p) for g, p in zip(args.grads, args.params, strict=True)]
    return args._replace(
        params=locals_of(args.params),
        grads=locals_of(grads),
        moments=locals_of(args.moments),
        scales=[s if s.numel() else s.reshape(0) for s in locals_of(args.scales)],
        weight_states=locals_of(args.weight_states),
    )


def step(op: StepOp, args: StepArgs, max_grad_norm: float | None, ranks: Sequence[Ranks | None]) -> None:
    """A step where no rank needs more of another's than norms: one call of the op, or one for each of its passes."""
    own = local_args(args)
    if max_grad_norm is not None:
        own = own._replace(grad_norm=grad_norm(own, ranks))
    if op.has_trust_ratios:
        own = own._replace(squares=_new_squares(own))
        _ops.step_(op, own._replace(squares_only=True))
        _reduce_squares([own], [ranks])
    _ops.step_(op, own)
    torch.autograd.graph.increment_version(args.params)


def step_with_numbers(op: StepOp, together: StepArgs | None, alone: Sequence[StepArgs]) -> None:
    """The step of tensors whose ranks need numbers of each other: squares of layers, largest values of blocks.

    ``together``: those that the op takes as they are. ``alone``: of one tensor each, for the reference.
    """
    calls: list[tuple[StepArgs, Callable[[StepArgs], None], list[Ranks | None]]] = []
    layouts = []
    if together is not None:
        calls.append((local_args(together), partial(_ops.step_, op), [*map(ranks_of, together.params)]))
    for args in alone:
        (p,), (group,) = args.params, args.group
        count = len(args.trust_ratios[0]) if op.has_trust_ratios else 1
        layout = _layout(p, args.block_size[group], count, coded=bool(args.scales))
        args = local_args(args)
        args = args._replace(scales=[s.view(layout.scale_shape) for s in args.scales])
        layouts.append(layout)
        calls.append((args, partial(_run_on_reference, op, layout), [ranks_of(p)]))
    if op.has_trust_ratios:
        calls = [(args._replace(squares=_new_squares(args)), run, ranks) for args, run, ranks in calls]
        for args, run, _ in calls:
            run(args._replace(squares_only=True))
        _reduce_squares([args for args, _, _ in calls], [ranks for _, _, ranks in calls])
    with_layouts = calls[len(calls) - len(layouts) :]
    for layout, (args, run, _) in zip(layouts, with_layouts, strict=True):
        if layout.cut:
            run(_copies(args))
    _reduce_magnitudes([layout.shard for layout in layouts], [ranks[0] for _, _, ranks in with_layouts])
    for args, run, _ in calls:
        run(args)
    parts = [*([] if together is None else [together]), *alone]
    torch.autograd.graph.increment_version([p for args in parts for x in args.params for p in (x, local(x))])


def _run_on_reference(op: StepOp, layout: ShardLayout, args: StepArgs) -> None:
    layout.shard.begin()
    getattr(reference, op.name)(ShardArgs.of(args, [layout]))


def _new_squares(args: StepArgs) -> Tensor:
    """Room for StepArgs.squares."""
    count = sum(map(Tensor.numel, args.trust_ratios))
    return torch.zeros((count, 2), dtype=torch.float64, device=args.params[0].device)


def _reduce_squares(parts: Sequence[StepArgs], ranks: Sequence[Sequence[Ranks | None]]) -> None:
    """Makes ``squares`` of the parts, whose tensors are on these ranks, those of all ranks."""
    values: list[tuple[Tensor, list[int], Tensor]] = []
    of_values: list[Ranks] = []
    for args, of_tensors in zip(parts, ranks, strict=True):
        squares = args.squares
        assert squares is not None
        if len({*map(id, of_tensors)}) == 1:  # mostly
            rows = {of_tensors[0]: [*range(len(squares))]}
        else:
            rows, first = {}, 0
            for ratios, found in zip(args.trust_ratios, of_tensors, strict=True):
                rows.setdefault(found, []).extend(range(first, first + ratios.numel()))
                first += ratios.numel()
        for found, own in rows.items():
            if found is not None:
                values.append((squares, own, squares if len(rows) == 1 else squares[own]))
                of_values.append(found)
    all_reduce("sum", [x for _, _, x in values], of_values)
    for squares, own, x in values:
        if x is not squares:
            squares[own] = x


def _reduce_magnitudes(shards: Sequence[Shard], ranks: Sequence[Ranks | None]) -> None:
    """Makes what the shards have noted the numbers of all ranks."""
    values = [(x, of) for shard, of in zip(shards, ranks, strict=True) for x in shard.noted]
    all_reduce("max", [x for x, _ in values], [of for _, of in values])
    for shard in shards:
        shard.reduced = shard.noted


def _copies(args: StepArgs) -> StepArgs:
    changed = ("params", "moments", "scales", "steps", "trust_ratios", "weight_states")
    copies: dict[str, Any] = {name: [x.clone() for x in getattr(args, name)] for name in changed}
    return args._replace(**copies)


def _layout(p: Tensor, block_size: int, layers: int, coded: bool = True) -> ShardLayout:
    """The blocks of this rank's shard of p."""
    own, shard = local(p), Shard()
    cut = coded and cuts_blocks(p, block_size)
    if layers == 1 and not cut:
        return ShardLayout.of(layout_of(own, block_size), shard)
    whole: BlockLayout = block_layout(p.shape, torch.empty(p.shape, device="meta").stride(), block_size)
    return ShardLayout.of_elements(whole, _index(p), shard, cut)


def _index(p: Any) -> Tensor:
    """The place of each local element in the whole tensor, both in the order of memory."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    own = local(p)
    index = torch.zeros((), dtype=torch.int64, device="cpu")
    for d, size in enumerate(p.shape):
        at = [
            x if x.is_replicate() or x.dim == d == 0 else Shard(0) if x.dim == d else Replicate()
            for x in p.placements
        ]
        places = torch.arange(size, device="cpu")
        along = distribute_tensor(places, p.device_mesh, at, src_data_rank=None).to_local().cpu()
        index = index[..., None] * size + along
    return index.reshape(-1).to(own.device)


# ---- codes outside of a step


def quantize(x: Tensor, codec: str, signed: bool, block_size: int, step: int) -> tuple[Tensor, Tensor]:
    """``_ops.quantize_blockwise`` of a DTensor, in the blocks of the whole tensor."""
    codes, scale = (
        torch.empty_like(x, dtype=torch.int8 if signed else torch.uint8),
        new_scale(x, x, block_size),
    )
    own, s = local(x), local(scale)
    if not cuts_blocks(x, block_size):
        if own.numel():
            q, found = _ops.quantize_blockwise(own, codec, signed, block_size, step)
            local(codes).copy_(q)
            s.copy_(found.reshape(s.shape))
        return codes, scale
    layout = _layout(x, block_size, 1)
    for _ in range(2):  # the first time with this rank's scales, then with those of all
        layout.shard.begin()
        q, found = encode_moment(layout.to_blocks(own), layout, CODECS[codec], signed, step)
        if not layout.shard.reduced:
            _reduce_magnitudes([layout.shard], [ranks_of(x)])
    layout.from_blocks(q, local(codes))
    s.copy_(found.reshape(s.shape))
    return codes, scale


def quantize_packed(w: Tensor, block_size: int, step: int) -> tuple[Tensor, Tensor]:
    """``reference.blockwise.quantize_packed`` of a DTensor, whose shards are whole blocks."""
    codes, scale, own = new_packed(w, w, block_size), new_scale(w, w, block_size), local(w)
    if own.numel():
        for to, x in zip((codes, scale), blockwise.quantize_packed(own, block_size, step), strict=True):
            local(to).copy_(x.reshape(local(to).shape))
    return codes, scale


def dequantize_packed(codes: Tensor, scale: Tensor, like: Tensor, block_size: int) -> Tensor:
    """Its inverse."""
    w = torch.empty_like(like, dtype=torch.float32)
    if local(w).numel():
        local(w).copy_(blockwise.dequantize_packed(local(codes), local(scale), local(like), block_size))
    return w


def dequantize(codes: Tensor, scale: Tensor, codec: str, block_size: int) -> Tensor:
    """``_ops.dequantize_blockwise`` to float32 of DTensors, in the blocks of the whole tensor."""
    x = torch.empty_like(codes, dtype=torch.float32)
    own, s, out = local(codes), local(scale), local(x)
    if own.numel() == 0:
        return x
    if cuts_blocks(codes, block_size):
        layout = _layout(codes, block_size, 1)
        layout.from_blocks(decode(code_blocks(own, layout), s.flatten()[layout.numbers], CODECS[codec]), out)
    else:
        out.copy_(_ops.dequantize_blockwise(own, s, codec, block_size, torch.float32))
    return x
