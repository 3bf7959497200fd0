"""The training loop: a run's model and optimizer, one step of it, its validation, and two runs in turn."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import memory
from ..applying import autocast
from ..options import OptionError, spelled
from .build import Source, build_objective, build_optimizer, resolve_device, resolved, schedule
from .config import DEFAULTED, FREE_ON_RESUME, TrainConfig
from .data import Batch, Corpus
from .distributed import (
    Processes,
    check_micro_batches,
    data_parallel,
    own_batches,
    prepared,
    synchronized,
)
from .evaluation import validate
from .phases import Phases

FORMAT = 2
KEYS = ("format", "config", "corpus", "step", "model", "optimizer", "scheduler", "scaler", "rng", "history")
"""Of a checkpoint: :meth:`Trainer.state_dict`."""


class Diverged(RuntimeError):
    """The training loss is no longer a finite number."""


@dataclasses.dataclass
class History:
    """The measurements of a run so far; part of its checkpoints, so that a resumed run reports on all its steps.

    train_loss, seconds: one entry per step. validation: (step, loss) pairs. Losses are in nats per byte or token.
    peak_bytes: tensor bytes of the last step, None where they are not counted; saved_bytes: what the forward pass
        of its first micro-batch saves for the backward pass. Counting slows that step down, so it is left out of the
        speed.
    """

    train_loss: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    peak_bytes: int | None = None
    saved_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class RunResult:
    """A finished run in figures; losses are nats per unit, tokens_per_second is that of the median step."""

    optimizer: str
    activations: str
    parameters: int
    optimizer_bytes: int
    bytes_per_parameter: float
    validation_loss: float
    peak_bytes: int | None
    saved_bytes: int
    median_step_seconds: float
    tokens_per_second: float
    history: History
    unit: str = "byte"


class Trainer:
    """Model, optimizer, schedule and measurements of one run, or of one process's share of it.

    Seeds torch's global generators with config.seed, from which the model's initial values come; batches
    depend on the seed and the step alone. ``step()`` and ``evaluate()`` advance the run; ``state_dict()`` is
    all that is needed to continue it: bit for bit on the CPU with the same number of threads and processes, and on
    CUDA with deterministic kernels (``torch.use_deterministic_algorithms``).

    group: several processes; each has the same ``config`` and ``corpus``, and calls the same methods.
    counts_peak: whether the last step's tensor bytes are counted. Autograd then adds the two gradients of a tied weight
    in a third buffer, which a run close to its limit (--fit) has no room for.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus | Source, group: Processes | None = None) -> None:
        source = corpus if isinstance(corpus, Source) else Source(corpus)
        config.validate()
        self.group = group or Processes()
        self.device = resolve_device(config, self.group)
        self.corpus = source.corpus
        self.config = config = resolved(config, self.corpus)
        check_micro_batches(config, self.group.world)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self.objective = build_objective(config, source, self.device)
        self.model = self.objective.model
        self.parallel = data_parallel(self.objective, config, self.group, self.device)
        self.optimizer = build_optimizer(config, self.model)
        self.scheduler = schedule(config, self.optimizer)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.techniques.autocast == "fp16")
        if self.group.rank:
            torch.manual_seed(config.seed + self.group.rank)  # dropout's
        self.phases: Phases | None = None
        self.counts_peak = True
        self.steps_done = 0
        self.history = History()
        self._batches: Iterator[tuple[list[Batch], int]] | None = None

    def loss(self, *batch: Tensor) -> Tensor:
        """The sum of a batch's cross-entropies in nats, computed in fp32."""
        objective = self.parallel if torch.is_grad_enabled() else self.objective
        with autocast(self.config.techniques, self.device.type):
            return objective(*(tensor.to(self.device) for tensor in batch))

    def _counted_loss(self, *batch: Tensor) -> Tensor:
        losses: list[Tensor] = []
        forward = lambda: losses.append(self.loss(*batch))  # noqa: E731
        self.history.saved_bytes = memory.saved_bytes(forward, self.model)
        return losses[0]

    def _mark(self, phase: str) -> None:
        if self.phases is not None:
            self.phases.mark(phase)

    def _next_batches(self) -> tuple[list[Batch], int]:
        """This process's micro-batches of the step, and how many targets all processes' have."""
        if self._batches is None:
            self._batches = prepared(self.corpus, self.config, self.group, self.steps_done)
        return next(self._batches)

    def _backward(self, batches: Sequence[Batch], count: int, counted: bool) -> Tensor:
        """Forward and backward over the micro-batches; the mean loss over the targets of all processes.

        DDP averages gradients over the processes, so that each one's are weighted with their number.
        """
        world, on_host = self.group.world, self.config.techniques.weights_on_host is not None
        total = torch.zeros((), device=self.device)
        for i, batch in enumerate(batches):
            with synchronized(self.parallel, i + 1 == len(batches), on_host):
                loss = (self._counted_loss if counted and i == 0 else self.loss)(*batch) / count
                self._mark("forward")
                self.scaler.scale(loss * world if world > 1 else loss).backward()
                self._mark("backward")
            total += loss.detach()
        return self.group.sum(total)

    def _update(self, counted: bool = False) -> float:
        """Forward and backward over the step's micro-batches, then the optimizer; the mean loss.

        counted: the first forward pass also counts what it saves for backward.
        """
        batches, count = self._next_batches()
        self._mark("begin")
        total = self._backward(batches, count, counted)
        if self.config.max_norm and not self.config.clips_in_step:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._mark("step")
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._mark("end")
        return total.item()

    def step(self) -> float:
        """One optimizer step; returns its training loss. The last one also counts saved bytes and the peak.

        Raises Diverged where the loss is not finite.
        """
        began = time.perf_counter()
        last = self.steps_done + 1 == self.config.steps
        # A dispatch mode, by which bytes are counted on a CPU, turns compiled functions off, from then on too.
        counted = self.counts_peak and not (self.config.techniques.compile and self.device.type == "cpu")
        if last and counted:
            losses: list[float] = []
            self.history.peak_bytes = memory.peak_bytes(
                lambda: losses.append(self._update(counted=True)), self.model, self.optimizer
            )
            loss = losses[0]
        else:
            loss = self._update(counted=last)
        self.history.seconds.append(time.perf_counter() - began)
        self.history.train_loss.append(loss)
        self.steps_done += 1
        if not math.isfinite(loss):
            raise Diverged(f"{self.config.techniques.label}: the loss is {loss} at step {self.steps_done}")
        return loss

    def evaluate(self) -> float:
        """Mean loss over the validation batches (always the same ones), also recorded in the history."""
        batches = own_batches(self.corpus.validation_batches(self.config), self.group)
        found = validate(self.objective, batches, self.loss, lambda sums: self.group.sum(sums.to(self.device)))
        self.history.validation.append((self.steps_done, found))
        return found

    def _rng_states(self) -> list[Tensor]:
        """The generators' states: the CPU's, and the CUDA device's if it trains there."""
        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        return states

    @property
    def has_dtensors(self) -> bool:
        """Whether parameters are DTensors: under fully_shard, which streams weights from the host, too."""
        on_host = self.config.techniques.weights_on_host is not None
        return on_host or (self.group.world > 1 and self.config.parallel == "fsdp")

    def _whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict without shards."""
        if not self.has_dtensors:
            return state
        from .sharding import whole

        return whole(state)

    def weights(self) -> dict[str, Any]:
        """The model's state dict, without shards; all processes must call it."""
        return self._whole(self.model.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors, numbers and strings: what ``torch.load(weights_only=True)`` reads back.

        Of several processes all must call it, and each gets the same.
        """
        return {
            "format": FORMAT,
            "config": dataclasses.asdict(self.config),
            "corpus": self.corpus.digest,
            "step": self.steps_done,
            "model": self.weights(),
            "optimizer": self._whole(self.optimizer.state_dict()),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": self.group.gather(self._rng_states()),
            "history": dataclasses.asdict(self.history),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the run of ``state``. Where options differ, raises OptionError and changes nothing."""
        saved = TrainConfig.from_dict(state["config"])
        options, options_before = self.config.options(), saved.options()
        for name, given in options.items():
            before = options_before[name]
            if name in FREE_ON_RESUME or given == before:
                continue
            used = DEFAULTED.get(name)  # the default may be given explicitly
            if used is None or getattr(self.config, used) != getattr(saved, used):
                before = getattr(saved, used) if used else before
                raise OptionError(
                    name,
                    f"{spelled(given)} given; allowed: {spelled(before)}, with which the resumed run began, or a new "
                    "run without --resume",
                )
        if state["corpus"] != self.corpus.digest:
            raise OptionError(
                "data",
                f"{self.corpus.name!r} given; allowed: the text with which the resumed run began, unchanged",
            )
        if state["step"] not in range(self.config.steps + 1):
            raise OptionError(
                "resume", f"given a checkpoint of step {state['step']!r}; allowed: 0 to {self.config.steps}"
            )
        models = (self.model.state_dict(), state["model"])
        shapes = [{name: tensor.shape for name, tensor in model.items()} for model in models]
        if shapes[0] != shapes[1]:
            raise OptionError("resume", f"given a checkpoint of another model; allowed: one of {self.config.model}")
        if self.has_dtensors:
            from .sharding import load_whole, load_whole_states

            load_whole(self.model, state["model"])
            load_whole_states(self.optimizer, state["optimizer"])
        else:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        if len(state["rng"]) == self.group.world:
            states = state["rng"][self.group.rank]
            torch.set_rng_state(states[0])
            if self.device.type == "cuda" and len(states) > 1:
                torch.cuda.set_rng_state(states[1], self.device)
        # Else, with another number of processes, the generators go on from the seed.
        self.steps_done = state["step"]
        self._batches = None
        self.history = History(**state["history"])

    def result(self) -> RunResult:
        """The figures of a run whose last step is done and validated."""
        history = self.history
        if history.saved_bytes is None or not history.validation:
            raise RuntimeError(f"no result after {self.steps_done} of {self.config.steps} steps")
        median = statistics.median(history.seconds[:-1] or history.seconds)
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        state_bytes = memory.optimizer_bytes(self.optimizer)
        return RunResult(
            optimizer=self.config.techniques.label,
            activations=self.config.activations,
            parameters=parameters,
            optimizer_bytes=state_bytes,
            bytes_per_parameter=state_bytes / parameters,
            validation_loss=history.validation[-1][1],
            peak_bytes=history.peak_bytes,
            saved_bytes=history.saved_bytes,
            median_step_seconds=median,
            tokens_per_second=self.config.tokens_per_step / median,
            history=history,
            unit=self.corpus.unit,
        )


def comparison(config: TrainConfig) -> list[TrainConfig]:
    """The baseline (:meth:`TrainConfig.baseline`) and ``config``."""
    return [config.baseline(), config]


def run(trainers: Sequence[Trainer], on_step: Callable[[Trainer], None] = lambda trainer: None) -> list[RunResult]:
    """Trains all to the end, a step of each in turn, so that a change in the machine's load affects them alike.

    on_step is called after each step and its validation, if it had one; it may save a checkpoint.
    """
    while any(trainer.steps_done < trainer.config.steps for trainer in trainers):
        for trainer in trainers:
            config = trainer.config
            if trainer.steps_done == config.steps:
                continue
            trainer.step()
            if trainer.steps_done % config.eval_every == 0 or trainer.steps_done == config.steps:
                trainer.evaluate()
            on_step(trainer)
    return [trainer.result() for trainer in trainers]
