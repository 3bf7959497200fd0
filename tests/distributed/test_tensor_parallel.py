"""Tensor parallelism (parallelize_module) with fully_shard, on a mesh of two dimensions, gives one process's losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from memkern import optim
from tests.support.ranks import Ranks


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 512), nn.GELU(), nn.Linear(512, 100), nn.Tanh(), nn.Linear(100, 7))


def train(data: int, tensor: int, new: Any, options: dict[str, Any]) -> Any:
    """Losses on a mesh of data x tensor ranks, and the placements of each parameter and of its exp_avg."""
    model = mlp()
    if data * tensor > 1:
        mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if data > 1:
            fully_shard(model, mesh=mesh["data"])
    optimizer = new(model.parameters(), **options)
    losses = []
    for step in range(6):
        generator = torch.Generator().manual_seed(step % 3)
        x, y = torch.randn(8, 96, generator=generator), torch.randn(8, 7, generator=generator)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    placements = [
        (str(getattr(p, "placements", None)), str(getattr(optimizer.state[p]["exp_avg"], "placements", None)))
        for p in model.parameters()
    ]
    return losses, placements


@pytest.mark.feature("torch", "tensor parallel DTensors: losses of one process")
@pytest.mark.full
@pytest.mark.parametrize("new", [optim.AdamW8bit, optim.Lion8bit, optim.LAMB8bit])
def test_losses_are_those_of_one_process(ranks: Ranks, new: Any) -> None:
    options = {"lr": 3e-3, "min_8bit_size": 0, "max_grad_norm": 1.0}
    ((expected, _),) = ranks(1, train, 1, 1, new, options)
    assert expected[3] < expected[0]  # batches repeat after three steps
    for data, tensor in ((1, 2), (2, 2)):
        for losses, placements in ranks(data * tensor, train, data, tensor, new, options):
            assert losses == pytest.approx(expected, rel=2e-3)  # sums of gradients have another order
            assert all(of_state == of_param for of_param, of_state in placements)
            assert len({of_param for of_param, _ in placements}) > 1
