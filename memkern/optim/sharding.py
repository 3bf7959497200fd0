"""Parameters of which a rank has a shard: DTensors (fully_shard, tensor parallelism), and FSDP1's flat parameters.

States are DTensors of the parameter's mesh and placements, and a step is one call of the op for all local tensors.
Whether a state has 8 bits, and where its blocks begin, is decided by the whole tensor: every rank has the bits that one
process alone would have. Ranks only exchange what no rank knows alone, in one collective for each mesh dimension:

- the norms of ``max_grad_norm`` and of LAMB's and LARS's layers, and a GradScaler's ``found_inf``;
- the scales of blocks that are on several ranks. A shard ends inside a block where a row is shorter than a block (1-D
  tensors, small convolutions) and the rows of a rank are not whole blocks, or where columns are sharded and those of a
  rank are not. Such a tensor's scales are replicated, and its step runs on the reference, as LAMB's and LARS's do for
  every shard.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import _ops, reference
from ..quant.codec import CODECS
from ..quant.layout import BlockLayout, block_layout, layout_of
from ..reference.blockwise import code_blocks, decode
from ..reference.shard import KINDS, Shard, ShardArgs, ShardLayout
from ..reference.state import encode_moment
from ..schemas import StepArgs, StepOp

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, DTensor

    from .base import BlockwiseOptimizer

Ranks = tuple["DeviceMesh", tuple[int, ...]]
"""A mesh, and those of its dimensions along which ranks have different elements of a tensor."""

_cut: Any = WeakIdKeyDictionary()  # parameters with blocks on several ranks, for the report


def report() -> dict[str, Any]:
    """What memkern.report() says of several processes."""
    alone = not (dist.is_available() and dist.is_initialized())
    return {
        "process_group": None
        if alone
        else f"{dist.get_backend()}, rank {dist.get_rank()} of {dist.get_world_size()}",
        "shards_end_inside_blocks": [
            f"{str(tuple(p.shape)).replace(' ', '')}: replicated scales, stepped on the reference"
            for p in _cut
        ],
    }


# ---- what is on which rank


def is_dtensor(x: Any) -> bool:
    if type(x) in (Tensor, torch.nn.Parameter):
        return False
    module = sys.modules.get("torch.distributed.tensor")  # where nobody has imported it there is no DTensor
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """The elements that this rank has."""
    if not is_dtensor(x):
        return x
    own = x._local_tensor  # to_local() makes a view of a parameter, at each step
    return own.wait() if hasattr(own, "wait") else own  # a collective that has not ended


def ranks_of(p: Tensor) -> Ranks | None:
    """The ranks that have other elements of a tensor, or None where this one has all."""
    if not is_dtensor(p):
        return None
    mesh = p.device_mesh
    dims = [k for k, at in enumerate(p.placements) if not at.is_replicate() and mesh.size(k) > 1]
    return (mesh, tuple(dims)) if dims else None


def cuts_blocks(p: Tensor, block_size: int) -> bool:
    """Whether a shard of p may end inside a block of the whole tensor. The same on every rank."""
    if (ranks := ranks_of(p)) is None or p.numel() == 0:
        return False
    layout, (mesh, dims) = layout_of(p, block_size), ranks
    short_rows = len(layout.scale_shape) == 1
    count: dict[int, int] = {}  # of shards, by dimension
    for k in dims:
        at = p.placements[k]
        count[at.dim] = count.get(at.dim, 1) * mesh.size(k)
        plain = type(at).__name__ == "Shard"
        if at.dim and not (plain and at.dim == 1 and not short_rows):
            return True
    inner = p.numel() // p.shape[0] if p.dim() else 1  # elements of a row
    if short_rows:
        nested = sum(1 for k in dims if p.placements[k].dim == 0) > 1
        return nested or -(-p.shape[0] // count[0]) * inner % layout.block != 0
    columns = count.get(1, 1)
    return columns > 1 and (p.shape[1] % columns != 0 or inner // columns % layout.block != 0)


def check_placements(p: Tensor) -> None:
    """Raises ValueError for a DTensor of which no rank has elements of its own, or not in the order of memory."""
    if not is_dtensor(p):
        return
    if any(at.is_partial() for at in p.placements):
        raise ValueError(f"params must be sharded or replicated, got placements {p.placements}")
    if ranks_of(p) and not (p.is_contiguous() and local(p).is_contiguous()):
        raise ValueError(
            f"sharded params must be contiguous, got shape {tuple(p.shape)} with strides {p.stride()} and local "
            f"strides {local(p).stride()}; call .contiguous() before they are sharded"
        )


def is_flat_shard(p: Tensor) -> bool:
    """Whether FSDP1 made p: a flat parameter, or what use_orig_params=True leaves of one on this rank."""
    return getattr(p, "_fsdp_flattened", False)


def check_flat_shard(p: Tensor, needs_norms: str | None) -> None:
    """Raises RuntimeError where norms are needed (by the option or class of that name) and FSDP1 hides the tensors."""
    alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    if needs_norms is None or not is_flat_shard(p) or (alone and needs_norms == "max_grad_norm"):
        return
    raise RuntimeError(
        f"{needs_norms} needs norms of whole tensors, and FullyShardedDataParallel leaves this rank a flat shard of "
        f"them ({p.numel()} elements) that names neither the tensors nor the process group; shard the model with "
        "torch.distributed.fsdp.fully_shard"
        + (", or clip with the model's own clip_grad_norm_" if needs_norms == "max_grad_norm" else "")
    )


# ---- states


def _placements_of_scales(p: DTensor, block_size: int) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    if cuts_blocks(p, block_size):
        return [Replicate()] * len(p.placements)
    columns = Shard(1) if len(layout_of(p, block_size).scale_shape) == 2 else Replicate()
    return [at if at.is_replicate() or at.dim == 0 else columns for at in p.placements]


def _scale(p: Tensor, own: Tensor, block_size: int) -> Tensor:
    """A rank's scales as those of a DTensor."""
    from torch.distributed.tensor import DTensor

    assert isinstance(p, DTensor)
    shape = layout_of(p, block_size).scale_shape
    stride = torch.empty(shape, device="meta").stride()
    at = _placements_of_scales(p, block_size)
    return DTensor.from_local(own, p.device_mesh, at, run_check=False, shape=torch.Size(shape), stride=stride)


def _shape_of_scales(p: Tensor, block_size: int) -> tuple[int, ...]:
    """Of the scales that this rank has."""
    shape, own = layout_of(p, block_size).scale_shape, local(p).shape
    if cuts_blocks(p, block_size) or not ranks_of(p):
        return shape
    inner = 1
    for size in own[1:]:
        inner *= size
    if len(shape) == 2:
        return own[0], -(-inner // block_size)
    return (-(-own[0] // (block_size // max(1, inner))),)


def new_scale(p: Tensor, like: Tensor, block_size: int) -> Tensor:
    """Zero scales for the moments of p, which has the blocks of ``like``."""
    if not is_dtensor(p):
        return torch.zeros(layout_of(like, block_size).scale_shape, dtype=torch.float32, device=p.device)
    own = torch.zeros(_shape_of_scales(p, block_size), dtype=torch.float32, device=local(p).device)
    return _scale(p, own, block_size)


def placed(key: str, x: Tensor, p: Tensor, block_size: int) -> Tensor:
    """A loaded state's tensor, on the ranks where the state of p has it."""
    of_elements = key not in ("step", "trust_ratio")
    if not is_dtensor(p) or not of_elements:
        return x.full_tensor() if is_dtensor(x) else x
    from torch.distributed.tensor import distribute_tensor

    scale = key.endswith("_scale")
    shape = layout_of(p, block_size).scale_shape if scale else p.shape
    if tuple(x.shape) != tuple(shape):
        return x  # there is a message for this
    at = tuple(_placements_of_scales(p, block_size)) if scale else p.placements
    if is_dtensor(x) and x.device_mesh == p.device_mesh:
        return x if x.placements == at else x.redistribute(placements=at)
    whole = x.full_tensor() if is_dtensor(x) else x
    return distribute_tensor(whole.detach(), p.device_mesh, at, src_data_rank=None)


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


def without_flat_codes(optimizer: BlockwiseOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict with the moments of FSDP1's flat shards as floats.

    FullyShardedDataParallel.optim_state_dict gathers what has an entry for each element, and makes the states of the
    model's own tensors of it. Loading quantizes them again.
    """
    from .storage import load_moment

    params = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
    changed = {}
    for (p, group), i in zip(params, numbers, strict=True):
        state = state_dict["state"].get(i, {})
        if is_flat_shard(p) and any(key.endswith("_scale") for key in state):
            moments = optimizer._op_of(group).moments
            changed[i] = {
                key: load_moment(key, state, group) if key in moments else x
                for key, x in state.items()
                if not key.endswith("_scale")
            }
    return {**state_dict, "state": {**state_dict["state"], **changed}} if changed else state_dict


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
    if is_dtensor(g) is not is_dtensor(p) or (is_dtensor(g) and g.device_mesh != p.device_mesh):
        raise RuntimeError(
            f"a gradient must be a DTensor of its parameter's mesh where that is one, got {type(g).__name__} for a "
            f"{type(p).__name__} of shape {tuple(p.shape)}"
        )
    return g.redistribute(placements=p.placements) if is_dtensor(g) and g.placements != p.placements else g


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


def needs_numbers(p: Tensor, group: dict[str, Any], coded: bool) -> bool:
    """Whether a step of p needs numbers of other ranks: norms of its layers, or largest values of its blocks."""
    if ranks_of(p) is None:
        return False
    cut = coded and cuts_blocks(p, group["block_size"])
    if cut:
        _cut[p] = True
    return cut or "layers" in group


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
    torch.autograd.graph.increment_version([p for args in (*parts, *own) for p in args.params])


def _reduce(kind: str, shards: Sequence[Shard], ranks: Sequence[Ranks | None]) -> None:
    """Makes what the shards have noted the numbers of all ranks."""
    values = [(x, of) for shard, of in zip(shards, ranks, strict=True) for x in shard.noted[kind]]
    all_reduce(kind, [x for x, _ in values], [of for _, of in values])
    for shard in shards:
        shard.reduced[kind] = shard.noted[kind]


def _copies(args: StepArgs) -> StepArgs:
    changed = ("params", "moments", "scales", "steps", "trust_ratios", "weight_states")
    return args._replace(**{name: [x.clone() for x in getattr(args, name)] for name in changed})


def _layout(p: Tensor, block_size: int, layers: int, coded: bool = True) -> ShardLayout:
    """The blocks of this rank's shard of p."""
    own, shard = local(p), Shard()
    cut = coded and cuts_blocks(p, block_size)
    if layers == 1 and not cut:
        return ShardLayout.of(layout_of(own, block_size), shard)
    whole: BlockLayout = block_layout(p.shape, torch.empty(p.shape, device="meta").stride(), block_size)
    return ShardLayout.of_elements(whole, _index(p), shard, cut)


def _index(p: Tensor) -> Tensor:
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
