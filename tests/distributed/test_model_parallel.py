"""Tensor parallelism with fully_shard has the losses of one process, and pipeline stages have its parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from memkern import optim
from tests.support.ranks import Ranks

# ---- tensor parallelism


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


# ---- a pipeline

MICROBATCHES = 4


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(96, 256), nn.GELU()),
        nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 32)),
    ]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 96, generator=generator), torch.randn(16, 32, generator=generator)


def in_pipeline(new: Any, count: int) -> Any:
    """The parameters of this rank's stage after ``count`` steps, and how many states its optimizer has."""
    rank, world = dist.get_rank(), dist.get_world_size()
    module = stages()[rank]
    schedule = ScheduleGPipe(PipelineStage(module, rank, world, torch.device("cpu")), MICROBATCHES, loss_fn=F.mse_loss)
    optimizer = new(module.parameters(), lr=1e-2)
    for step in range(count):
        x, y = batch(step)
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in module.parameters()], len(optimizer.state)


@pytest.mark.feature("torch", "`torch.distributed.pipelining`: an optimizer for each stage")
@pytest.mark.full
@pytest.mark.parametrize("new", [optim.AdamW8bit, optim.LAMB8bit])
def test_a_stage_has_its_optimizer_and_the_parameters_of_one_process(ranks: Ranks, new: Any) -> None:
    count, model = 6, nn.Sequential(*stages())
    optimizers = [new(stage.parameters(), lr=1e-2) for stage in model]
    for step in range(count):
        x, y = batch(step)
        for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            (F.mse_loss(model(a), b) / MICROBATCHES).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (params, states), stage in zip(ranks(2, in_pipeline, new, count), model, strict=True):
        assert states == len(params)
        for result, p in zip(params, stage.parameters(), strict=True):
            torch.testing.assert_close(result, p.detach(), rtol=1e-3, atol=1e-4)
