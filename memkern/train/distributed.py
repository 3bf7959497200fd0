"""Trains in several processes: the micro-batches of each, DDP and FSDP2, and state dicts of whole tensors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._pytree import tree_map

from ..blocks.block_lists import block_lists
from ..optim.dtensor.shards import is_dtensor, local, sharded, whole
from ..optim.state import State
from ..techniques.options import OptionError, refused
from .config import TrainConfig


def world() -> int:
    """The number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's number. Process 0 writes files and prints."""
    return dist.get_rank() if world() > 1 else 0


def gathered(value: Any) -> list[Any]:
    """The values of all processes, by rank."""
    values: list[Any] = [value] * world()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Makes torch.distributed's group, if torchrun has started several: gloo on the CPU, nccl on CUDA devices.

    A group that exists already is used and stays. One that is made here ends with the scope, as does the one that a
    single process makes for weights on the host. Raises OptionError for variables of the environment that
    torch.distributed cannot use.
    """
    had_one, given = dist.is_available() and dist.is_initialized(), os.environ.get("WORLD_SIZE", "1")
    if given != "1" and not had_one:
        with refused("WORLD_SIZE", f"{given!r} given in the environment"):
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
        if world() > 1:
            dist.barrier()  # no process ends while another one still gathers
    finally:
        if not had_one and dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def check_processes(config: TrainConfig) -> None:
    """Raises OptionError unless all processes have the same number of micro-batches in a step, and can share it."""
    count, each_has_one = world(), config.step_in_backward
    if each_has_one and count > 1 and config.weights_on_host is None:
        raise OptionError("step_in_backward", f"given in {count} processes; allowed in one, or with weights_on_host")
    if config.batch_factor * config.accumulation % count or (each_has_one and config.batch_factor != count):
        given = f"{config.batch_factor} given with --accumulation {config.accumulation} in {count} processes"
        allowed = f"{count} with --step-in-backward" if each_has_one else f"a product that {count} divides"
        raise OptionError("batch_factor", f"{given}; allowed: {allowed}")
    if config.offload == "cpu" and config.parallel == "ddp" and count > 1 and not config.is_torch:
        why = "gradients go to the host before DDP reduces them"
        raise OptionError("offload", f"'cpu' given in {count} processes; allowed with --parallel fsdp: {why}")


def data_parallel(objective: nn.Module, config: TrainConfig, device: torch.device) -> nn.Module:
    """DDP around the objective, or ``fully_shard`` of its blocks and itself, in place; in one process the objective."""
    if world() == 1 or config.weights_on_host:  # which is sharded already
        return objective
    if config.parallel == "ddp":
        devices = [device] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(objective, device_ids=devices, gradient_as_bucket_view=True)
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(device.type, (world(),))
    for blocks in block_lists(objective):
        for block in blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    return objective


def synchronized(parallel: Any, last: bool, on_host: bool = False) -> AbstractContextManager[Any]:
    """Around the forward and backward pass of a micro-batch: gradients are reduced after the last one.

    on_host: after each one, as gradients are added up on the host, and the device has no room for them.
    """
    if hasattr(parallel, "set_requires_gradient_sync"):  # fully_shard's
        parallel.set_requires_gradient_sync(last or on_host)
    return nullcontext() if last or not hasattr(parallel, "no_sync") else parallel.no_sync()  # DDP's


def full(state: Any) -> Any:
    """A state dict whose shards are put together, on the CPU; all processes must call it."""

    def on_cpu(x: Any) -> Any:
        if not is_dtensor(x):
            return x
        # One process has all: a copy would take the memory of the model on the host once more.
        return x.to_local().cpu() if x.device_mesh.size() == 1 else whole(x).cpu()

    return tree_map(on_cpu, state)


@torch.no_grad()
def load_full(model: nn.Module, state: dict[str, Any]) -> None:
    """Loads a state dict of full tensors into a model, or into its shards."""
    for name, x in model.state_dict().items():
        local(x).copy_(local(sharded(state[name], x)) if is_dtensor(x) else state[name])


def load_full_states(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads an optimizer's state of full tensors, where its parameters may be shards."""
    optimizer.load_state_dict(state)
    for p, states in optimizer.state.items():
        if isinstance(states, State):  # memkern's optimizers have placed theirs, and trust ratios stay whole
            continue
        for key, x in states.items():
            if is_dtensor(p) and isinstance(x, Tensor) and not is_dtensor(x) and x.dim():
                states[key] = sharded(x, p)
