"""A step of shards, and what ranks compute together for it: norms, scales of blocks that several of them have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _ops, reference
from ..quant.codec import CODECS, WEIGHTS
from ..quant.layout import BlockLayout, block_layout, layout_of
from ..reference.blockwise import code_blocks, decode
from ..reference.shard import KINDS, Shard, ShardArgs, ShardLayout
from ..reference.state import encode_moment, skipped
from ..reference.trust import both_or_one
from ..schemas import LAMB_STEP, StepArgs, StepOp
from .sharding import Ranks, cuts_blocks, is_dtensor, local, new_scale, ranks_of

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


def grad_norm(args: StepArgs, local_grads: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients, fp64, unscaled, of tensors whose shards ``local_grads`` are."""
    of_ranks: dict[Ranks | None, list[Tensor]] = {}
    for p, g in zip(args.params, local_grads, strict=True):
        of_ranks.setdefault(ranks_of(p), []).append(g)
    device = local_grads[0].device
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
    grads = [local(_matching(g, p)) for g, p in zip(args.grads, args.params, strict=True)]
    scales = [local(s) for s in args.scales]
    return args._replace(
        params=[local(p) for p in args.params],
        grads=grads,
        moments=[local(x) for x in args.moments],
        scales=[s if s.numel() else s.reshape(0) for s in scales],
        weight_states=[local(x) for x in args.weight_states],
    )


def step(op: StepOp, args: StepArgs, max_grad_norm: float | None) -> None:
    """One call of the op for all local tensors, where no rank needs anything of another's but the norm."""
    own = local_args(args)
    if max_grad_norm is not None:
        own = own._replace(grad_norm=grad_norm(args, own.grads))
    _ops.step_(op, own)
    torch.autograd.graph.increment_version(args.params)


def step_with_numbers(op: StepOp, parts: Sequence[StepArgs]) -> None:
    """The step of tensors, each in args of its own, whose ranks need numbers of each other."""
    run = getattr(reference, op.name)
    layouts, ranks, own = [], [], []
    for args in parts:
        (p,), (group,) = args.params, args.group
        hyperparameters = op.of_groups(args)[group]
        count = len(args.trust_ratios[0]) if hasattr(hyperparameters, "layers") else 1
        layout = _layout(p, args.block_size[group], count, coded=bool(args.scales))
        layouts.append(layout)
        ranks.append(ranks_of(p))
        args = local_args(args)
        own.append(args._replace(scales=[s.view(layout.scale_shape) for s in args.scales]))
    fused = [op is LAMB_STEP and _is_fused(args, layout) for args, layout in zip(own, layouts, strict=True)]
    if any(fused):
        _lamb_step(*_where(fused, own, ranks))
        own, ranks, layouts = _where([not x for x in fused], own, ranks, layouts)
    for kind in KINDS:
        asks = [op.has_trust_ratios if kind == "sum" else layout.cut for layout in layouts]
        for args, layout, asked in zip(own, layouts, asks, strict=True):
            layout.shard.begin()
            if asked:
                run(ShardArgs.of(_copies(args), [layout]))
        _reduce(kind, [layout.shard for layout in layouts], ranks)
    for args, layout in zip(own, layouts, strict=True):
        layout.shard.begin()
        run(ShardArgs.of(args, [layout]))
    torch.autograd.graph.increment_version([p for args in parts for x in args.params for p in (x, local(x))])


def _where(chosen: list[bool], *lists: list[Any]) -> list[list[Any]]:
    return [[x for x, yes in zip(one, chosen, strict=True) if yes] for one in lists]


def _is_fused(args: StepArgs, layout: ShardLayout) -> bool:
    """Whether :func:`_lamb_step` takes a tensor: one layer of whole blocks, stored as its values to the nearest."""
    stored = args.storage_of(args.group[0]) == WEIGHTS["nearest"]
    return layout.places is None and stored and args.params[0].dtype != torch.float64


def _lamb_step(parts: Sequence[StepArgs], ranks: Sequence[Ranks | None]) -> None:
    """LAMB's step of shards, by one call of the op for all.

    Of a parameter of zeros, without decay and at a learning rate of 1, the op makes minus LAMB's direction, with the
    moments as they should be. Decay, norms and the update are torch's operations. 4 bytes per element at a time.
    """
    first = parts[0]
    if skipped(first.found_inf):
        return
    groups, device = LAMB_STEP.of_groups(first), first.params[0].device
    plain = {"weight_decay": 0.0, "decoupled_decay": 0.0, "always_adapt": 0.0, "layers": 1.0}
    updates = [torch.zeros_like(args.params[0], dtype=torch.float32) for args in parts]
    one_step = first._replace(
        params=updates,
        grads=[args.grads[0] for args in parts],
        moments=[args.moments[k] for k in range(2) for args in parts],
        scales=[args.scales[k] for k in range(2) for args in parts if args.scales],
        steps=[args.steps[0] for args in parts],
        trust_ratios=[args.trust_ratios[0] for args in parts],
        group=[args.group[0] for args in parts],
        lr=[torch.ones((), dtype=torch.float64)] * len(first.lr),
        hyperparameters=[
            plain.get(name, getattr(h, name)) for h in groups for name in LAMB_STEP.hyperparameters
        ],
    )
    _ops.step_(LAMB_STEP, one_step)
    params, sums = [], []
    for args, u in zip(parts, updates, strict=True):
        h, lr, x = groups[args.group[0]], args.lr[args.group[0]].to(device).double(), args.params[0].float()
        u.neg_()
        if h.decoupled_decay:
            x = x * (1.0 - lr * h.weight_decay).float()
        elif h.weight_decay:
            u.add_(x, alpha=h.weight_decay)
        params.append(x)
        norms = torch.zeros(2, dtype=torch.float64, device=device)
        for norm, y in zip(norms, (x, u), strict=True):
            _ops.grad_norm_(norm, [y], None)  # a third of torch.linalg.vector_norm's time in fp64
        sums.append(norms.square())
    all_reduce("sum", sums, ranks)
    for args, x, u, squares in zip(parts, params, updates, sums, strict=True):
        h, lr, ratio = groups[args.group[0]], args.lr[args.group[0]].to(device).double(), args.trust_ratios[0]
        if h.weight_decay or h.always_adapt:
            x_norm, norm = squares.sqrt()
            ratio.copy_(both_or_one(x_norm, norm, x_norm / norm))
            if h.trust_clip:
                ratio.clamp_(max=1.0)
        x.sub_(u.mul_((lr * ratio.double()).float()))
        if x is not args.params[0]:
            args.params[0].copy_(x)


def _reduce(kind: str, shards: Sequence[Shard], ranks: Sequence[Ranks | None]) -> None:
    """Makes what the shards have noted the numbers of all ranks."""
    values = [(x, of) for shard, of in zip(shards, ranks, strict=True) for x in shard.noted[kind]]
    all_reduce(kind, [x for x, _ in values], [of for _, of in values])
    for shard in shards:
        shard.reduced[kind] = shard.noted[kind]


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
    index = torch.zeros((), dtype=torch.int64)
    for d, size in enumerate(p.shape):
        at = [
            x if x.is_replicate() or x.dim == d == 0 else Shard(0) if x.dim == d else Replicate()
            for x in p.placements
        ]
        along = distribute_tensor(torch.arange(size), p.device_mesh, at, src_data_rank=None).to_local().cpu()
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
            _reduce("max", [layout.shard], [ranks_of(x)])
    layout.from_blocks(q, local(codes))
    s.copy_(found.reshape(s.shape))
    return codes, scale


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
