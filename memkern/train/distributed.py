"""Several processes: which micro-batches each has, DDP and FSDP2, and state dicts of whole tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._pytree import tree_map

from ..blocks.block_lists import block_lists
from ..optim.dtensor.shards import is_dtensor, local, sharded
from ..optim.state import State
from ..techniques.options import OptionError
from .config import TrainConfig


@dataclasses.dataclass(frozen=True)
class Processes:
    """This process among those that train together; alone by default."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """The one that writes files and prints."""
        return self.rank == 0

    @classmethod
    def from_environment(cls) -> Processes:
        """As torchrun says: RANK, WORLD_SIZE and LOCAL_RANK. Raises OptionError for what no launcher sets."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        given = {name: os.environ.get(name, str(int(name == "WORLD_SIZE"))) for name in names}
        try:
            rank, world, local_rank = map(int, given.values())
        except ValueError:
            raise OptionError("RANK", f"{given} given in the environment; allowed: whole numbers") from None
        if not 0 <= rank < world:
            raise OptionError("RANK", f"{rank} given in the environment; allowed: 0 to below WORLD_SIZE, {world}")
        return cls(rank, world, local_rank)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank."""
        values: list[Any] = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    @contextlib.contextmanager
    def joined(self, device: str | None) -> Iterator[None]:
        """torch.distributed's, where there are several processes: gloo on the CPU, nccl on CUDA devices.

        Ends that which one process has needed for its weights on the host, too.
        """
        had_one = dist.is_available() and dist.is_initialized()
        if self.world > 1:
            on_cuda = torch.cuda.is_available() if device is None else device.startswith("cuda")
            try:
                dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo")
            except ValueError as error:  # a variable that torchrun sets is absent
                raise OptionError("WORLD_SIZE", f"{self.world} given in the environment: {error}") from None
        try:
            yield
        finally:
            if not had_one and dist.is_available() and dist.is_initialized():
                dist.destroy_process_group()


def check_micro_batches(config: TrainConfig, world: int) -> None:
    """Raises OptionError unless all processes have the same number of micro-batches in a step."""
    if config.micro_batches % world:
        given = f"{config.batch_factor} given with --accumulation {config.techniques.accumulation}"
        allowed = f"values whose product is a multiple of {world}, such as {world}"
        raise OptionError("batch_factor", f"{given} in {world} processes; allowed: {allowed}")
    if config.techniques.step_in_backward and config.techniques.weights_on_host is None and world > 1:
        raise OptionError("step_in_backward", f"given in {world} processes; allowed in one, or with weights_on_host")
    if config.techniques.step_in_backward and config.batch_factor != world:
        text = f"{config.batch_factor} given with --step-in-backward in {world} processes; allowed: {world}, a"
        raise OptionError("batch_factor", f"{text} micro-batch of each: gradients are freed as soon as they are there")


def data_parallel(objective: nn.Module, config: TrainConfig, world: int, device: torch.device) -> nn.Module:
    """DDP around the objective, or ``fully_shard`` of its blocks and of itself, in place; alone, the objective.

    With weights_on_host ``fully_shard`` is for one process, too, and leaves the weights on the host.
    """
    if config.techniques.weights_on_host:
        from ..stream.streaming import stream

        stream(objective, device, pin_memory=config.pin_memory)
    elif world > 1 and config.parallel == "ddp":
        devices = [device] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(objective, device_ids=devices, gradient_as_bucket_view=True)
    elif world > 1:
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh(device.type, (world,))
        for blocks in block_lists(objective):
            for block in blocks:
                fully_shard(block, mesh=mesh)
        fully_shard(objective, mesh=mesh)
    return objective


def synchronized(parallel: Any, last: bool, on_host: bool = False) -> AbstractContextManager[Any]:
    """Around the forward and backward pass of a micro-batch: gradients are reduced after the last one.

    on_host: after each one, as gradients are added up on the host, and the device has no room for them.
    """
    if isinstance(parallel, nn.parallel.DistributedDataParallel):
        return nullcontext() if last else parallel.no_sync()
    if hasattr(parallel, "set_requires_gradient_sync"):  # fully_shard's
        parallel.set_requires_gradient_sync(last or on_host)
    return nullcontext()


def full(state: Any) -> Any:
    """A state dict whose shards are put together, on the CPU; all processes must call it."""

    def gathered(x: Any) -> Any:
        if not is_dtensor(x):
            return x
        # One process has all: a copy would take the memory of the model on the host once more.
        return x.to_local().cpu() if x.device_mesh.size() == 1 else x.full_tensor().cpu()

    return tree_map(gathered, state)


@torch.no_grad()
def load_full(model: nn.Module, state: dict[str, Any]) -> None:
    """Loads a state dict of full tensors into a model, or into its shards."""
    own = model.state_dict()
    if not any(map(is_dtensor, own.values())):
        model.load_state_dict(state)
        return
    for name, x in own.items():
        if not is_dtensor(x):
            x.copy_(state[name])
        elif x.device_mesh.size() == 1:
            local(x).copy_(state[name])
        else:
            local(x).copy_(local(sharded(state[name], x)))


def load_full_states(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads an optimizer's state of full tensors, where its parameters may be shards."""
    optimizer.load_state_dict(state)
    for p, own in optimizer.state.items():
        if isinstance(own, State):  # memkern's optimizers have placed theirs, and trust ratios stay whole
            continue
        for key, x in own.items():
            if is_dtensor(p) and isinstance(x, Tensor) and not is_dtensor(x) and x.dim():
                own[key] = sharded(x, p)
