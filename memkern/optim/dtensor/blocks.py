"""The blocks of a shard, and its codes outside of a step: quantized and dequantized in the whole tensor's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _ops
from ...quant.codec import CODECS
from ...quant.layout import BlockLayout, block_layout, layout_of
from ...reference.blockwise import code_blocks, decode
from ...reference.shard import Shard, ShardLayout
from ...reference.state import encode_moment
from .collectives import all_reduce
from .shards import Ranks, cuts_blocks, local, new_scale, ranks_of


def layout_of_shard(p: Tensor, block_size: int, layers: int, coded: bool = True) -> ShardLayout:
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
            x if x.is_replicate() or x.dim == d == 0 else Shard(0) if x.dim == d else Replicate() for x in p.placements
        ]
        places = torch.arange(size, device="cpu")
        along = distribute_tensor(places, p.device_mesh, at, src_data_rank=None).to_local().cpu()
        index = index[..., None] * size + along
    return index.reshape(-1).to(own.device)


def reduce_magnitudes(shards: Sequence[Shard], ranks: Sequence[Ranks | None]) -> None:
    """Replaces the magnitudes that the shards have noted by the largest of all ranks."""
    values = [(x, of) for shard, of in zip(shards, ranks, strict=True) for x in shard.noted]
    all_reduce("max", [x for x, _ in values], [of for _, of in values])
    for shard in shards:
        shard.reduced = shard.noted


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
    layout = layout_of_shard(x, block_size, 1)
    for _ in range(2):  # the first time with this rank's scales, then with those of all
        layout.shard.begin()
        q, found = encode_moment(layout.to_blocks(own), layout, CODECS[codec], signed, step)
        if not layout.shard.reduced:
            reduce_magnitudes([layout.shard], [ranks_of(x)])
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
        layout = layout_of_shard(codes, block_size, 1)
        layout.from_blocks(decode(code_blocks(own, layout), s.flatten()[layout.numbers], CODECS[codec]), out)
    else:
        out.copy_(_ops.dequantize_blockwise(own, s, codec, block_size, torch.float32))
    return x
