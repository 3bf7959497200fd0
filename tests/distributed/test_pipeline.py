"""Each stage of torch.distributed.pipelining has its own optimizer and the parameters of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

from memkern import optim
from tests.support.ranks import Ranks

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
