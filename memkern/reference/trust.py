"""What LAMB and LARS share: the norms of a tensor's layers and the trust ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from ..quant.layout import BlockLayout, layer_count
from ..schemas import StepArgs, StepOp
from .blockwise import arithmetic, from_blocks
from .shard import ShardArgs, ShardLayout


def check_trust_ratios(op: StepOp, args: StepArgs) -> None:
    """Raises before anything is changed unless there is a ratio for each layer of each tensor."""
    if isinstance(args, ShardArgs):
        return  # a shard does not tell how many layers its tensor has
    groups = op.of_groups(args)
    for i, (p, ratios, group) in enumerate(zip(args.params, args.trust_ratios, args.group, strict=True)):
        count = layer_count(p, args.block_size[group], int(groups[group].layers))
        dtype = arithmetic(p.dtype)
        if ratios.dtype != dtype or tuple(ratios.shape) != (count,) or not ratios.is_contiguous():
            raise ValueError(
                f"trust_ratios[{i}] must be contiguous {dtype} of shape ({count},), got {ratios.dtype} of shape "
                f"{tuple(ratios.shape)}"
            )


def norms(x: Tensor, layout: BlockLayout, count: int) -> Tensor:
    """|x| of each of ``count`` layers, from blocks: fp64, summed in fp64. The order of the sum is free."""
    elements = torch.empty(layout.numel, dtype=x.dtype, device=x.device)
    from_blocks(x, layout, elements)
    squares = elements.double().square()
    if not isinstance(layout, ShardLayout):
        return squares.reshape(count, -1).sum(1).sqrt()
    if count == 1:
        sums = squares.sum().reshape(1)
    else:
        assert layout.places is not None
        layers = layout.layers_of_blocks(count)[layout.places // layout.block]
        sums = squares.new_zeros(count).index_add_(0, layers, squares)
    return layout.shard.of_all("sum", sums).sqrt()


def both_or_one(x_norm: Tensor, norm: Tensor, ratio: Tensor) -> Tensor:
    """``ratio``, or 1 where a norm is 0 (or NaN: no order tells it from 0)."""
    return torch.where((x_norm > 0) & (norm > 0), ratio, 1.0)


def of_blocks(values: Tensor, layout: BlockLayout, x: Tensor) -> Tensor:
    """A number per layer as a column with one per block, in the dtype of x. Layers are whole blocks."""
    if isinstance(layout, ShardLayout) and values.numel() > 1:
        return values.to(x.dtype)[layout.layers_of_blocks(values.numel())][:, None]
    return values.to(x.dtype).repeat_interleave(layout.blocks // max(1, values.numel()))[:, None]
