"""Under fully_shard and DDP, compiled blocks that save 8-bit codes have gradients within 2 % of eager mode's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.compiled.blocks import Block
from tests.support.partitioned import backend, relative_error
from tests.support.ranks import Ranks
from tests.support.sharded import full_tensor

WIDTH = 64


def gradients(wrapper: str, bits: Any) -> Tensor:
    """The gradients of one forward pass (DDP) or of two (fully_shard).

    bits: 8 or "exact" for memkern's partitioner, "torch" for torch's own, None for eager mode.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, x = nn.Sequential(Block(WIDTH), Block(WIDTH)), torch.randn(2, 128, WIDTH)
    compiler = backend(None if bits == "torch" else bits)
    if wrapper == "fully_shard":
        for block in net:
            if bits is not None:
                block.compile(backend=compiler)
            fully_shard(block)
        fully_shard(net)
        model: Any = net
    else:
        model = DistributedDataParallel(net)
        if bits is not None:
            model = torch.compile(model, backend=compiler)
    losses = [model(y).square().mean() for y in ((x, 2 * x) if wrapper == "fully_shard" else (x,))]
    for loss in losses:
        loss.backward()
    return torch.cat([full_tensor(p.grad).flatten().double() for p in net.parameters()])


def errors(wrapper: str) -> dict[Any, float]:
    """Errors of compiled gradients against eager mode's, by what is saved for the backward pass."""
    expected = gradients(wrapper, None)
    return {bits: relative_error(gradients(wrapper, bits), expected) for bits in ("torch", "exact", 8)}


@pytest.mark.full
@pytest.mark.parametrize("wrapper", ["fully_shard", "DDP"])
def test_gradients_are_near_those_of_eager_mode(ranks: Ranks, wrapper: str) -> None:
    for rank_errors in ranks(2, errors, wrapper):
        assert rank_errors["exact"] <= max(1e-5, 2 * rank_errors["torch"])  # sums have another order
        assert 1e-5 < rank_errors[8] < 0.02  # above 1e-5: something was saved in codes
