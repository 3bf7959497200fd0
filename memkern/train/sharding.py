"""FSDP2: a model in shards, and its state dicts as whole tensors. Imported where there are several processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ..blocks.block_lists import block_lists
from ..optim.dtensor.shards import local, sharded
from ..optim.state import State
from .objective import Objective


def shard(objective: Objective, world: int, device: torch.device) -> None:
    """``fully_shard`` of the blocks and of the whole, in place, over ``world`` processes."""
    mesh = init_device_mesh(device.type, (world,))
    for blocks in block_lists(objective.model):
        for block in blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(objective, mesh=mesh)


def whole(state: Any) -> Any:
    """A state dict whose shards are put together, on the CPU; all processes must call it."""
    return tree_map_only(DTensor, _whole, state)


def _whole(x: DTensor) -> torch.Tensor:
    # One process has all: a copy would take the memory of the model on the host once more.
    return x.to_local().cpu() if x.device_mesh.size() == 1 else x.full_tensor().cpu()


@torch.no_grad()
def load_whole(model: nn.Module, state: dict[str, Any]) -> None:
    """Copies whole tensors into a model's shards, one after the other; ``state`` has the names of its state dict."""
    for name, x in model.state_dict().items():
        whole = state[name]
        if not isinstance(x, DTensor):
            x.copy_(whole)
        elif x.device_mesh.size() == 1:
            local(x).copy_(whole)
        else:
            local(x).copy_(local(sharded(whole, x)))


def load_whole_states(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads an optimizer's state of whole tensors, where its parameters are shards."""
    optimizer.load_state_dict(state)
    for p, own in optimizer.state.items():
        if isinstance(own, State):  # memkern's optimizers have placed theirs, and trust ratios stay whole
            continue
        for key, x in own.items():
            if isinstance(p, DTensor) and isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and x.dim():
                own[key] = sharded(x, p)
