"""FSDP2: a model in shards, and its state dicts as whole tensors. Imported where there are several processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ..swap.block_lists import block_lists
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


def load_whole(model: nn.Module, state: dict[str, Any]) -> None:
    """Loads whole tensors into shards."""
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
