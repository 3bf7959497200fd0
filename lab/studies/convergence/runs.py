"""Makes training runs, in this order: a grid of four learning rates with seed 0, then the best with other seeds."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .contenders import Contender
from .tasks import TASKS, LargeBatch, Task

GRID = (1, 2, 4, 8)  # multiples of the lowest rate, which a task has for each family
MOVES = 3  # the most rates by which a grid grows at an edge, while the best rate is there
TUNING_SEED = 0  # the rate is chosen with this seed, and the comparison uses seeds 1, 2, ...


class Outcome(NamedTuple):
    """The figures of a run: columns of the results."""

    loss: float
    bytes_per_param: float  # stored weights and optimizer states
    coded_share: float  # the share of parameters without a state of 16 bits or more per element
    saved_kb: float  # kB that the forward pass of a batch saves for its backward pass
    step_ns: float  # processor time of optimizer.step(), per parameter
    run_ms: float  # processor time of a whole training step


def parts(optimizer: Any) -> list[Any]:
    """The optimizers inside of a TorchMuon, or the optimizer itself."""
    return [*getattr(optimizer, "inner", [optimizer])]


def _leaves(value: Any) -> Iterator[Tensor]:
    """The plain tensors of a state."""
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):  # torchao's states
            for name in value.__tensor_flatten__()[0]:
                yield from _leaves(getattr(value, name))
        else:
            yield value


def coded_share(optimizer: Any, stored: nn.Module) -> float:
    coded = 0
    for part in parts(optimizer):
        for p, state in part.state.items():
            tensors = [x for value in state.values() for x in _leaves(value)]
            is_wide = any(x.element_size() > 1 and x.numel() >= p.numel() for x in tensors)
            coded += 0 if is_wide else p.numel()
    return coded / sum(p.numel() for p in stored.parameters())


class Run:
    """A model that computes in fp32, and a second one with the weights as they are stored and stepped."""

    def __init__(self, task: Task, contender: Contender, lr: float, seed: int) -> None:
        import memkern

        self.task, self.contender, self.seed = task, contender, seed
        self.model = task.model(seed)
        dtype = contender.weights or task.weights
        # A whole model, as muon_groups and param_groups look at its modules.
        self.stored = self.model if dtype == torch.float32 else copy.deepcopy(self.model).to(dtype)
        if contender.compress is not None:
            memkern.compress(self.model, **contender.compress)
        self.optimizer = contender.make(self.stored, lr, task)
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.step_seconds: list[float] = []

    @torch.no_grad()
    def _load(self) -> None:
        """Copies the stored weights into the model that computes."""
        if self.stored is not self.model:
            for p, stored in zip(self.model.parameters(), self.stored.parameters(), strict=True):
                p.copy_(stored)

    def _step(self, step: int) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            lr = self.task.rate(rate, step)
            if isinstance(group["lr"], Tensor):  # torchao's
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._load()
        for p in self.model.parameters():
            p.grad = None
        self.task.loss(self.model, self.task.batch(self.seed, step)).backward()
        if self.task.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip)
        if self.stored is not self.model:
            for p, stored in zip(self.model.parameters(), self.stored.parameters(), strict=True):
                stored.grad = None if p.grad is None else p.grad.to(stored.dtype)
        start = time.process_time()
        self.optimizer.step()
        self.step_seconds.append(time.process_time() - start)

    def train(self) -> Outcome:
        from memkern import memory

        torch.manual_seed(self.seed)  # for random numbers in training; the weights are made already
        start = time.process_time()
        for step in range(self.task.steps):
            self._step(step)
        seconds = time.process_time() - start
        self._load()
        loss = self.task.validation_loss(self.model)
        numel = sum(p.numel() for p in self.stored.parameters())
        states = sum(memory.optimizer_bytes(part) for part in parts(self.optimizer))
        batch = self.task.batch(self.seed, 0)
        return Outcome(
            loss if math.isfinite(loss) else math.inf,
            (memory.tensor_bytes(self.stored.parameters()) + states) / numel,
            coded_share(self.optimizer, self.stored),
            memory.live_bytes_after(lambda: self.task.loss(self.model, batch), self.model, *batch) / 1000,
            statistics.median(self.step_seconds) / numel * 1e9,
            seconds / self.task.steps * 1000,
        )


def run(task: Task, contender: Contender, lr: float, seed: int) -> Outcome:
    return Run(task, contender, lr, seed).train()


Key = tuple[str, str, str, str]  # task, contender, rate, seed, as the results have them


def key(task: Task, contender: Contender, lr: float, seed: int) -> Key:
    return task.name, contender.name, f"{lr:.5g}", str(seed)


class Study:
    """Says which runs are still missing. losses: by key, the losses of finished runs; the caller adds each new one."""

    def __init__(self, losses: dict[Key, float]) -> None:
        self.losses = losses

    def plan(self, task: Task, contender: Contender) -> Iterator[tuple[Contender, float, int]]:
        """Yields the next run that has no loss yet, until none is left; add its loss before asking for another."""
        while (rate_and_seed := self._next(task, contender)) is not None:
            yield contender, *rate_and_seed

    def at_each_others(
        self, task: Task, contender: Contender, original: Contender
    ) -> Iterator[tuple[Contender, float, int]]:
        """The original's runs at the contender's rate, then the contender's at the rate of the original's best mean.

        At one rate, a difference comes from the states. The best rates are chosen by one seed each, so that at
        these even equal contenders differ.
        """
        best = self.best(task, contender)
        if isinstance(best, tuple):
            raise LookupError(f"{contender.name} has no best rate in {task.name} yet")
        yield from self._missing(task, original, best)
        rates = {lr for name, one, lr, _ in self.losses if (name, one) == (task.name, original.name)}
        means = {
            float(lr): statistics.fmean(self.losses[key(task, original, float(lr), s)] for s in task.compared)
            for lr in sorted(rates)
            if not [*self._missing(task, original, float(lr))]
        }
        yield from self._missing(task, contender, min(means, key=lambda rate: means[rate]))

    def _missing(self, task: Task, contender: Contender, lr: float) -> Iterator[tuple[Contender, float, int]]:
        for seed in task.compared:
            if key(task, contender, lr, seed) not in self.losses:
                yield contender, lr, seed

    def _next(self, task: Task, contender: Contender) -> tuple[float, int] | None:
        best = self.best(task, contender)
        if isinstance(best, tuple):
            return best
        return next(((lr, seed) for _, lr, seed in self._missing(task, contender, best)), None)

    def best(self, task: Task, contender: Contender) -> float | tuple[float, int]:
        """The best rate, or the rate and seed of the run that is missing to know it."""
        if isinstance(task, LargeBatch) and task.factor > 1:
            small = self.best(TASKS["batch-x1"], contender)
            if isinstance(small, tuple):
                raise LookupError(
                    f"{task.name} takes its rate from batch-x1, which has no best rate of {contender.name}"
                )
            return task.scaled(contender.family, small)
        low, high = 0, len(GRID) - 1  # the grid's powers of 2, times the first rate
        while True:
            losses = {}
            for power in range(low, high + 1):
                lr = task.first[contender.family] * 2.0**power
                loss = self.losses.get(key(task, contender, lr, TUNING_SEED))
                if loss is None:
                    return lr, TUNING_SEED
                losses[power] = loss
            best = min(losses, key=lambda power: losses[power])
            if not task.extends or not math.isfinite(losses[best]):
                break
            if best == high and high < len(GRID) - 1 + MOVES:
                high += 1
            elif best == low and low > -MOVES:
                low -= 1
            else:
                break
        return task.first[contender.family] * 2.0**best
