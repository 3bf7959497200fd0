"""Compiled blocks whose backward pass saves codes, under fully_shard and DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.partitioned import backend
from tests.support.ranks import Ranks
from tests.support.small_llama import WIDTH, Block, error


def gradients(how: str, bits: Any) -> dict[str, Tensor]:
    """Of two forward passes before a backward pass. bits: "torch" for its own partitioner, None to compile nothing."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, x = nn.Sequential(Block(), Block()), torch.randn(2, 128, WIDTH)
    cut = backend(None if bits == "torch" else bits)
    if how == "fully_shard":
        for block in net:
            if bits is not None:
                block.compile(backend=cut)
            fully_shard(block)
        fully_shard(net)
        model: Any = net
    else:
        model = DistributedDataParallel(net)
        if bits is not None:
            model = torch.compile(model, backend=cut)
    losses = [model(y).square().mean() for y in (x, 2 * x)][: 2 if how == "fully_shard" else 1]
    for loss in losses:
        loss.backward()
    found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for name, g in found.items()}


def errors(how: str) -> dict[Any, float]:
    expected = gradients(how, None)
    return {bits: error(gradients(how, bits), expected) for bits in ("torch", "exact", 8)}


@pytest.mark.full
@pytest.mark.parametrize("how", ["fully_shard", "DDP"])
def test_gradients(ranks: Ranks, how: str) -> None:
    for found in ranks(2, errors, how):
        assert found["exact"] <= max(1e-5, 2 * found["torch"])
        assert 1e-5 < found[8] < 0.02
