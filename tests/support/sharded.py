"""Models under fully_shard, and the same models in one process, which step with the same gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from memkern import optim
from memkern.train.model import GPT


def gpt() -> nn.Module:
    """GPT-2's architecture: rows of 144 and 576 elements end inside blocks, and 2 or 3 ranks have unequal shards."""
    torch.manual_seed(0)
    return GPT(layers=1, heads=4, width=144, seq_len=35)


class Odd(nn.Module):
    """Tensors whose shards end inside blocks, but for ``whole``'s; ``tiny`` has no elements on the third rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.long = nn.Parameter(torch.randn(1001))  # 1-D: rows of one element
        self.short = nn.Parameter(torch.randn(37, 3, 5))  # 8 rows to a block
        self.tiny = nn.Parameter(torch.randn(2, 300))  # no row for the third rank
        self.whole = nn.Parameter(torch.randn(48, 40))  # 3 rows to a block, 24 or 16 rows to a rank


@functools.cache
def _gradient(shape: tuple[int, ...], number: int, step: int) -> Tensor:
    """A random gradient around 1e-3, 1e-2 or 0.1, by the parameter's number; a fifth of the elements are 0."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    g = torch.randn(shape, generator=generator) * 10.0 ** (number % 3 - 3)
    return g * (torch.rand(shape, generator=generator) < 0.8)


def gradient(p: Tensor, number: int, step: int) -> Tensor:
    """The whole gradient of the parameter of this number at a step; gradients repeat after ten steps."""
    return _gradient(tuple(p.shape), number, step % 10).to(p.dtype, copy=True)


def mesh(*sizes: int) -> DeviceMesh:
    """A CPU mesh of all ranks, or of these sizes."""
    names = ("replicate", "shard") if len(sizes) == 2 else ("shard",)
    return init_device_mesh("cpu", sizes or (dist.get_world_size(),), mesh_dim_names=names)


def in_shards(model: nn.Module, **options: Any) -> nn.Module:
    """The model after ``fully_shard`` of each of its blocks, then of the model."""
    options = {"mesh": mesh(), **options}
    for block in getattr(model, "blocks", []):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def muon_groups(params: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Tensors of two dimensions and more for Muon, the others for AdamW."""
    params = [*params]
    groups = [
        {"params": [p for p in params if p.dim() >= 2]},
        {"params": [p for p in params if p.dim() < 2], "algorithm": "adamw", "lr": 1e-3},
    ]
    return [group for group in groups if group["params"]]


def new_muon(params: Iterable[Tensor], **options: Any) -> optim.Muon:
    """An optimizer with the groups of :func:`muon_groups`."""
    return optim.Muon8bit(muon_groups(params), **{"lr": 0.02, **options})


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, end: int, scale: float = 1.0) -> None:
    """Steps number ``first`` to ``end - 1`` with :func:`gradient`'s gradients, of which each rank takes its shards."""
    for step in range(first, end):
        for number, p in enumerate(model.parameters()):
            g = gradient(p, number, step) * scale
            if isinstance(p, DTensor):
                g = distribute_tensor(g, p.device_mesh, p.placements, src_data_rank=None)
            p.grad = g
        optimizer.step()


def full_tensor(x: Any) -> Any:
    """The whole tensor of a DTensor; anything else as it is."""
    if not isinstance(x, DTensor):
        return x
    # Neither gloo nor NCCL gathers int16. torch 2.11 leaves gaps where it has padded parts to one size.
    return x.int().full_tensor().short() if x.dtype == torch.int16 else x.full_tensor().contiguous()


def full_params_and_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All parameters and states as whole tensors, by the parameters' names."""
    return {
        name: {
            "param": full_tensor(p.detach()),
            **{key: full_tensor(x) for key, x in sorted(optimizer.state[p].items())},
        }
        for name, p in model.named_parameters()
    }


def run_in_one_process(
    build: Callable[..., nn.Module], new: Any, options: dict[str, Any], count: int, scale: float = 1.0
) -> dict[str, Any]:
    """Parameters and states of the whole model ``build()`` after ``count`` steps of the optimizer class ``new``."""
    model = build()
    optimizer = new(model.parameters(), **options)
    steps(model, optimizer, 0, count, scale)
    return full_params_and_states(model, optimizer)
