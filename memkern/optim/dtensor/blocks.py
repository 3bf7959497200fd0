"""Finds the whole tensor's blocks in a shard, and quantizes and dequantizes shards in them outside of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _ops
from ...quant.codec import CODECS
from ...quant.layout import BlockLayout, block_layout, layout_of
from ...reference.blockwise import code_blocks, decode
from ...reference.shard import BlockMagnitudes, ShardLayout
from ...reference.state import encode_moment
from .collectives import all_reduce
from .shards import Ranks, cuts_blocks, local, new_scale, ranks_of


def layout_of_shard(p: Tensor, block_size: int, layers: int, coded: bool = True) -> ShardLayout:
    """The blocks of this rank's shard of p, a tensor of so many ``layers``. coded: whether its state has codes."""
    own = local(p)
    cut = coded and cuts_blocks(p, block_size)
    if layers == 1 and not cut:
        return ShardLayout.of_whole_blocks(layout_of(own, block_size))
    whole: BlockLayout = block_layout(p.shape, torch.empty(p.shape, device="meta").stride(), block_size)
    return ShardLayout.of_elements(whole, _index(p), cut)


def _index(p: Any) -> Tensor:
    """For each local element its index in the whole tensor, both in memory order."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    own = local(p)
    index = torch.zeros((), dtype=torch.int64, device="cpu")
    for d, size in enumerate(p.shape):
        placements = [Replicate() if x.is_replicate() or x.dim != d else x for x in p.placements]
        if d != 0:  # the vector of positions along d has one dimension
            placements = [x if x.is_replicate() else Shard(0) for x in placements]
        positions = torch.arange(size, device="cpu")
        own_positions = distribute_tensor(positions, p.device_mesh, placements, src_data_rank=None).to_local().cpu()
        index = index[..., None] * size + own_positions
    return index.reshape(-1).to(own.device)


def reduce_magnitudes(magnitudes: Sequence[BlockMagnitudes], ranks: Sequence[Ranks | None]) -> None:
    """Reduces the largest magnitudes of tensors' blocks over the ranks that have parts of each tensor."""
    pairs = [(own, owners) for each, owners in zip(magnitudes, ranks, strict=True) for own in each.own]
    all_reduce("max", [own for own, _ in pairs], [owners for _, owners in pairs])  # in place
    for each in magnitudes:
        each.reduced = each.own


# ---- codes outside of a step


def quantize(x: Tensor, codec: str, signed: bool, block_size: int, step: int) -> tuple[Tensor, Tensor]:
    """``_ops.quantize_blockwise`` of a DTensor, in the blocks of the whole tensor."""
    codes = torch.empty_like(x, dtype=torch.int8 if signed else torch.uint8)
    scale = new_scale(x, x, block_size)
    own, own_scale = local(x), local(scale)
    if not cuts_blocks(x, block_size):
        if own.numel():
            new_codes, scales = _ops.quantize_blockwise(own, codec, signed, block_size, step)
            local(codes).copy_(new_codes)
            own_scale.copy_(scales.reshape(own_scale.shape))
        return codes, scale
    layout = layout_of_shard(x, block_size, 1)
    for _ in range(2):  # with this rank's magnitudes first, then with those of all ranks
        layout.magnitudes.begin_run()
        new_codes, scales = encode_moment(layout.to_blocks(own), layout, CODECS[codec], signed, step)
        if not layout.magnitudes.reduced:
            reduce_magnitudes([layout.magnitudes], [ranks_of(x)])
    layout.from_blocks(new_codes, local(codes))
    own_scale.copy_(scales.reshape(own_scale.shape))
    return codes, scale


def dequantize(codes: Tensor, scale: Tensor, codec: str, block_size: int) -> Tensor:
    """``_ops.dequantize_blockwise`` to float32 of DTensors, in the blocks of the whole tensor."""
    x = torch.empty_like(codes, dtype=torch.float32)
    own, own_scale, out = local(codes), local(scale), local(x)
    if own.numel() == 0:
        return x
    if cuts_blocks(codes, block_size):
        layout = layout_of_shard(codes, block_size, 1)
        values = decode(code_blocks(own, layout), own_scale.flatten()[layout.numbers], CODECS[codec])
        layout.from_blocks(values, out)
    else:
        out.copy_(_ops.dequantize_blockwise(own, own_scale, codec, block_size, torch.float32))
    return x
