"""Several processes: who they are, which micro-batches each has, and sums over them."""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ..options import OptionError
from .config import TrainConfig
from .data import IGNORED, Batch, Corpus
from .objective import Objective


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
        """As torchrun says: RANK, WORLD_SIZE and LOCAL_RANK.

        Raises OptionError for what no launcher sets, as a part of them that was left from another command.
        """
        given = {name: os.environ.get(name, default) for name, default in VARIABLES.items()}
        for name, value in given.items():
            if not (value.isascii() and value.isdigit()):
                raise OptionError(name, f"{value!r} given in the environment; allowed: a whole number, 0 or more")
        rank, world, local = map(int, given.values())
        if rank >= world:
            raise OptionError("RANK", f"{rank} given in the environment; allowed: below WORLD_SIZE, {world}")
        absent = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if world > 1 and absent:
            text = f"{world} given in the environment without {', '.join(absent)}; allowed: as torchrun sets them"
            raise OptionError("WORLD_SIZE", text)
        return cls(rank, world, local)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()


VARIABLES = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


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


def own_batches(batches: Sequence[Batch], group: Processes) -> list[Batch]:
    """This process's micro-batches: every world-th, from the rank-th on. All processes have the same number.

    If the last step of an epoch has too few, a process takes the first micro-batch without its targets: the gradients
    are zeros, and the process takes part in the reductions.
    """
    own = list(batches[group.rank :: group.world])
    if len(own) < -(-len(batches) // group.world):
        first = batches[0]
        own.append(first._replace(targets=torch.full_like(first.targets, IGNORED)))
    return own


def prepared(corpus: Corpus, config: TrainConfig, group: Processes, first: int) -> Iterator[tuple[list[Batch], int]]:
    """This process's micro-batches of each step from ``first`` on, with the number of targets of all processes.

    config.workers threads prepare them ahead of time. They are no processes, which signals to the group would end.
    """

    def prepare(step: int) -> tuple[list[Batch], int]:
        batches = corpus.step(config, step)
        return own_batches(batches, group), sum(batch.predicted for batch in batches)

    steps = iter(range(first, config.steps))
    if not config.workers:
        yield from map(prepare, steps)
        return
    with ThreadPoolExecutor(config.workers) as pool:
        ready = deque(pool.submit(prepare, step) for step in islice(steps, 2 * config.workers))
        while ready:
            found = ready.popleft().result()
            ready.extend(pool.submit(prepare, step) for step in islice(steps, 1))
            yield found


def data_parallel(objective: Objective, config: TrainConfig, group: Processes, device: torch.device) -> nn.Module:
    """DDP around the objective, or ``fully_shard`` of its blocks and of itself, in place; alone, the objective.

    With weights_on_host ``fully_shard`` is for one process, too, and leaves the weights on the host.

    Raises OptionError for what cannot be sharded.
    """
    if config.techniques.weights_on_host:
        from ..stream.streaming import stream

        stream(objective, device, pin_memory=config.pin_memory)
        return objective
    if group.world == 1:
        return objective
    if config.parallel == "ddp":
        return nn.parallel.DistributedDataParallel(
            objective, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
        )
    from .sharding import shard

    shard(objective, group.world, device)
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
