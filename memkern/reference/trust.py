"""What LAMB and LARS share: sums of squares of a tensor's layers, and trust ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from ..quant.codec import LEAST_NORM
from ..quant.layout import BlockLayout, arithmetic, layer_count
from ..schemas import StepArgs, StepOp
from .blockwise import from_blocks
from .shard import ShardArgs, ShardLayout
from .state import StepTensor


def check_trust_ratios(op: StepOp, args: StepArgs) -> None:
    """Raises before anything is changed unless there is a ratio for each layer of each tensor."""
    count = sum(len(ratios) for ratios in args.trust_ratios)
    if args.squares is None:
        if args.squares_only:
            raise ValueError("squares_only needs squares to write to")
    elif (
        args.squares.dtype != torch.float64
        or tuple(args.squares.shape) != (count, 2)
        or not args.squares.is_contiguous()
    ):
        raise ValueError(
            f"squares must be contiguous float64 of shape ({count}, 2), got {args.squares.dtype} of shape "
            f"{tuple(args.squares.shape)}"
        )
    if isinstance(args, ShardArgs):
        return  # a shard does not tell how many layers its tensor has
    groups = op.group_hyperparameters(args)
    for i, (p, ratios, group) in enumerate(zip(args.params, args.trust_ratios, args.group, strict=True)):
        count = layer_count(p, args.block_size[group], int(groups[group].layers))
        dtype = arithmetic(p.dtype)
        if ratios.dtype != dtype or tuple(ratios.shape) != (count,) or not ratios.is_contiguous():
            raise ValueError(
                f"trust_ratios[{i}] must be contiguous {dtype} of shape ({count},), got {ratios.dtype} of shape "
                f"{tuple(ratios.shape)}"
            )


def _sum_squares(x: Tensor, layout: BlockLayout, count: int) -> Tensor:
    """The squares of x, in blocks, summed over each of ``count`` layers in fp64, in any order."""
    elements = torch.empty(layout.numel, dtype=x.dtype, device=x.device)
    from_blocks(x, layout, elements)
    squares = elements.double().square()
    if not isinstance(layout, ShardLayout):
        return squares.reshape(count, -1).sum(1)
    if count == 1:
        return squares.sum().reshape(1)
    assert layout.places is not None
    layers = layout.layers_of_blocks(count)[layout.places // layout.block]
    return squares.new_zeros(count).index_add_(0, layers, squares)


def squares_of_layers(t: StepTensor, x: Tensor, update: Tensor) -> Tensor:
    """(layers, 2) fp64: the sums of squares of a parameter and of what is in the ratio's denominator, in blocks.

    The ones that the step was given, or else the tensor's own; with squares_only the own ones are stored.
    """
    assert t.trust_ratios is not None
    if t.squares is not None and not t.squares_only:
        return t.squares
    own = torch.stack([_sum_squares(y, t.layout, len(t.trust_ratios)) for y in (x, update)], 1)
    if t.squares is not None:
        t.squares.copy_(own)
    return own


def ratio_or_one(x_norm: Tensor, norm: Tensor, ratio: Tensor) -> Tensor:
    """``ratio``, or 1 where a norm is 0 (or NaN: no order tells it from 0)."""
    return torch.where((x_norm > LEAST_NORM) & (norm > 0), ratio, 1.0)


def per_block(values: Tensor, layout: BlockLayout, x: Tensor) -> Tensor:
    """Spreads a number per layer into a column with one per block, in the dtype of x. Layers are whole blocks."""
    if isinstance(layout, ShardLayout) and values.numel() > 1:
        return values.to(x.dtype)[layout.layers_of_blocks(values.numel())][:, None]
    return values.to(x.dtype).repeat_interleave(layout.blocks // max(1, values.numel()))[:, None]
