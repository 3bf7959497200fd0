"""The training loop: a run's model, optimizer and schedule, one step of it, its validation, and two runs in turn."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from .. import memory
from ..optim.dtensor.shards import local
from ..techniques.applying import apply, autocast, make_optimizer, optimizer_groups, weight_dtype
from ..techniques.options import OptionError, Techniques, spelled
from .config import FREE_ON_RESUME, TrainConfig
from .data import Batch, Bytes, Corpus, load_corpus
from .distributed import Processes, check_micro_batches, data_parallel, full, load_full, load_full_states, synchronized
from .model import GPT, ByteModel, LanguageModel, Objective

KEYS = ("format", "config", "corpus", "step", "model", "optimizer", "scheduler", "scaler", "rng", "history")
"""Of a checkpoint: :meth:`Trainer.state_dict`."""


class Diverged(RuntimeError):
    """The training loss is no longer a finite number."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A run's data, and what its model is made of: for models of transformers their configuration and tokenizer."""

    corpus: Corpus
    hf_config: Any = None
    tokenizer: Any = dataclasses.field(default_factory=Bytes)


def load(config: TrainConfig) -> Source:
    """Reads the text that ``config`` names, as its model needs it. Raises OptionError for what cannot be used."""
    hf_config: Any = None
    tokenizer: Any = Bytes()
    if not config.is_preset:
        from . import huggingface

        hf_config = huggingface.load_config(config)
        tokenizer = huggingface.load_tokenizer(config, hf_config)
    corpus = load_corpus(config.data, seq_len=config.seq_len, text_field=config.text_field, tokenizer=tokenizer)
    return Source(corpus, hf_config, tokenizer)


def build_objective(config: TrainConfig, source: Source, device: torch.device) -> Objective:
    """The model with its loss on the device, compressed, checkpointed and compiled as the techniques say.

    With weights_on_host it is on the host: :func:`~.distributed.data_parallel` brings its blocks to the device.
    """
    objective: Objective
    techniques = config.techniques
    if techniques.weights_on_host:
        device = torch.device("cpu")
    if config.is_preset:
        layers, heads, width = config.shape
        gpt = GPT(layers=layers, heads=heads, width=width, seq_len=config.seq_len)
        objective = ByteModel(gpt.to(device, weight_dtype(techniques)), techniques.loss_chunk)
    else:
        from . import huggingface

        objective = LanguageModel(huggingface.build(config, source.hf_config).to(device), techniques.loss_chunk)
    if techniques.weights_on_host:
        from ..stream import streaming

        streaming.check(objective)
    apply(objective.model, techniques.replace(weights_on_host=None))
    return objective


def build_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the techniques, with weight decay for matrices; torch's Adam and AdamW are its fused ones."""
    groups = optimizer_groups(model, config.techniques, lr=config.peak_lr, weight_decay=config.decay)
    options: dict[str, Any] = {}
    if config.techniques.is_torch:
        # torch 2.13's fused SGD writes garbage into bf16 weights on a CPU, and takes no DTensors.
        options = {"foreach": False} if config.techniques.algorithm == "sgd" else {"fused": True}
    if config.clips_in_step:
        options["max_grad_norm"] = config.max_norm
    return make_optimizer(groups, config.techniques, lr=config.peak_lr, **options)


def warmup_cosine(
    optimizer: torch.optim.Optimizer, *, warmup: int, steps: int, start: float | None = None
) -> LRScheduler:
    """A linear warm-up by iteration, then a cosine from lr to lr / 10 at the last step.

    ::

        lr * (t + 1) / (warmup + 1)                       for t < warmup, by default
        lr * (start + (1 - start) * t / warmup)           with start: from start * lr to lr

    The second, from the rate of the base batch to the scaled one, is that of Goyal et al., arXiv 1706.02677, section
    2.2.
    """
    lr = optimizer.param_groups[0]["lr"]
    factor = 1 / (warmup + 1) if start is None else start
    linear = LinearLR(optimizer, start_factor=factor, total_iters=warmup)
    cosine = CosineAnnealingLR(optimizer, T_max=steps - warmup, eta_min=lr / 10)
    return SequentialLR(optimizer, [linear, cosine], milestones=[warmup])


def resolve_device(config: TrainConfig, group: Processes | None = None) -> torch.device:
    """The device to train on; of several processes each has the CUDA device of its local rank.

    Raises OptionError where it is absent or cannot do what --precision asks.
    """
    name = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and group is not None and group.world > 1:
        name = f"cuda:{group.local_rank}"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise OptionError("device", f"{name!r} given; allowed: cpu, cuda, cuda:N")
    if device.type == "cuda":
        if (device.index or 0) >= (count := torch.cuda.device_count()):
            raise OptionError("device", f"{name!r} given, of {count} CUDA devices; allowed: cpu, cuda:N below {count}")
        if (precision := config.techniques.precision).startswith("bf16") and not torch.cuda.is_bf16_supported():
            text = f"{precision!r} given, which {name!r} does not support; allowed: fp32, fp16-mixed"
            raise OptionError("precision", text)
    return device


@dataclasses.dataclass
class History:
    """The measurements of a run so far; part of its checkpoints, so that a resumed run reports on all its steps.

    train_loss, seconds: one entry per step. validation: (step, loss) pairs. Losses are in nats per byte or token.
    saved_bytes: what the forward pass of the last step's first micro-batch saves for the backward pass.
    """

    train_loss: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    saved_bytes: int | None = None


FORMAT = [[field.name for field in dataclasses.fields(cls)] for cls in (TrainConfig, Techniques, History)]
"""Of checkpoints: those of a version with other options are refused."""


@dataclasses.dataclass(frozen=True)
class RunResult:
    """A finished run in figures; losses are nats per unit, tokens_per_second is that of the median step.

    optimizer_bytes: of this process, which with FSDP2 has the states of its shards.
    """

    optimizer: str
    parameters: int
    optimizer_bytes: int
    bytes_per_parameter: float
    validation_loss: float
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
    """

    def __init__(self, config: TrainConfig, corpus: Corpus | Source, group: Processes | None = None) -> None:
        source = corpus if isinstance(corpus, Source) else Source(corpus)
        config.validate()
        self.config, self.corpus, self.group = config, source.corpus, group or Processes()
        self.device = resolve_device(config, self.group)
        check_micro_batches(config, self.group.world)
        torch.manual_seed(config.seed)
        self.objective = build_objective(config, source, self.device)
        self.model = self.objective.model
        self.parallel = data_parallel(self.objective, config, self.group.world, self.device)
        self.optimizer = build_optimizer(config, self.model)
        start = None if config.warmup_from == "zero" else config.base_lr / config.peak_lr
        self.scheduler = warmup_cosine(self.optimizer, warmup=config.warmup_steps, steps=config.steps, start=start)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.techniques.autocast == "fp16")
        if self.group.rank:
            torch.manual_seed(config.seed + self.group.rank)  # dropout's
        self.steps_done = 0
        self.history = History()

    def loss(self, *batch: Tensor) -> Tensor:
        """The sum of a batch's cross-entropies in nats, computed in fp32."""
        objective = self.parallel if torch.is_grad_enabled() else self.objective
        with autocast(self.config.techniques, self.device.type):
            return objective(*(tensor.to(self.device) for tensor in batch))

    def _counted_loss(self, *batch: Tensor) -> Tensor:
        losses: list[Tensor] = []
        self.history.saved_bytes = memory.saved_bytes(lambda: losses.append(self.loss(*batch)), self.model)
        return losses[0]

    def _backward(self, batches: Sequence[Batch], counted: bool) -> Tensor:
        """Forward and backward over this process's micro-batches; the mean loss over the targets of all processes.

        DDP averages gradients over the processes, so that each one's are weighted with their number.
        """
        world, on_host = self.group.world, self.config.techniques.weights_on_host is not None
        total = torch.zeros((), device=self.device)
        for i, batch in enumerate(batches):
            with synchronized(self.parallel, i + 1 == len(batches), on_host):
                loss = self._counted_loss(*batch) if counted and i == 0 else self.loss(*batch)
                loss = loss / self.config.tokens_per_step
                self.scaler.scale(loss * world if world > 1 else loss).backward()
            total += loss.detach()
        return self.group.sum(total)

    def step(self) -> float:
        """One optimizer step; returns its training loss. The last one also counts what is saved for backward.

        Raises Diverged where the loss is not finite.
        """
        began = time.perf_counter()
        batches = self.corpus.step(self.config, self.steps_done)[self.group.rank :: self.group.world]
        total = self._backward(batches, counted=self.steps_done + 1 == self.config.steps)
        if self.config.max_norm and not self.config.clips_in_step:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss = total.item()
        self.history.seconds.append(time.perf_counter() - began)
        self.history.train_loss.append(loss)
        self.steps_done += 1
        if not math.isfinite(loss):
            raise Diverged(f"{self.config.techniques.label}: the loss is {loss} at step {self.steps_done}")
        return loss

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the validation batches (always the same ones), also recorded in the history."""
        self.objective.eval()
        sums = torch.zeros(2, dtype=torch.float64)  # losses, targets
        batches, world = self.corpus.validation_batches(self.config), self.group.world
        for i in range(self.group.rank, -(-len(batches) // world) * world, world):
            batch = batches[i % len(batches)]
            loss = self.loss(*batch).item()
            if i < len(batches):  # else run for fully_shard, which needs all processes
                sums += torch.tensor([loss, batch.targets.numel()], dtype=torch.float64)
        self.objective.train()
        losses, count = self.group.sum(sums.to(self.device)).tolist()
        self.history.validation.append((self.steps_done, losses / count))
        return losses / count

    def weights(self) -> dict[str, Any]:
        """The model's state dict, without shards; all processes must call it."""
        return full(self.model.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors, numbers and strings: what ``torch.load(weights_only=True)`` reads back.

        Of several processes all must call it, and each gets the same.
        """
        rng = [torch.get_rng_state()]
        if self.device.type == "cuda":
            rng.append(torch.cuda.get_rng_state(self.device))
        return {
            "format": FORMAT,
            "config": dataclasses.asdict(self.config),
            "corpus": self.corpus.digest,
            "step": self.steps_done,
            "model": self.weights(),
            "optimizer": full(self.optimizer.state_dict()),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": self.group.gather(rng),
            "history": dataclasses.asdict(self.history),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the run of ``state``. Where options differ, raises OptionError and changes nothing."""
        before = TrainConfig.from_dict(state["config"]).options()
        for name, given in self.config.options().items():
            if name not in FREE_ON_RESUME and given != before[name]:
                allowed = f"{spelled(before[name])}, with which the resumed run began, or a new run without --resume"
                raise OptionError(name, f"{spelled(given)} given; allowed: {allowed}")
        if state["corpus"] != self.corpus.digest:
            allowed = "the text with which the resumed run began, unchanged"
            raise OptionError("data", f"{self.corpus.name!r} given; allowed: {allowed}")
        if state["step"] not in range(self.config.steps + 1):
            text = f"given a checkpoint of step {state['step']!r}; allowed: 0 to {self.config.steps}"
            raise OptionError("resume", text)
        shapes = [{name: x.shape for name, x in each.items()} for each in (self.model.state_dict(), state["model"])]
        if shapes[0] != shapes[1]:
            raise OptionError("resume", f"given a checkpoint of another model; allowed: one of {self.config.model}")
        load_full(self.model, state["model"])
        load_full_states(self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        if len(state["rng"]) == self.group.world:  # else the generators go on from the seed
            states = state["rng"][self.group.rank]
            torch.set_rng_state(states[0])
            if self.device.type == "cuda" and len(states) > 1:
                torch.cuda.set_rng_state(states[1], self.device)
        self.steps_done = state["step"]
        self.history = History(**state["history"])

    def result(self) -> RunResult:
        """The figures of a run whose last step is done and validated."""
        history = self.history
        if history.saved_bytes is None or not history.validation:
            raise RuntimeError(f"no result after {self.steps_done} of {self.config.steps} steps")
        median = statistics.median(history.seconds[:-1] or history.seconds)  # the last one counted bytes
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        state_bytes = memory.optimizer_bytes(self.optimizer)
        return RunResult(
            optimizer=self.config.techniques.label,
            parameters=parameters,
            optimizer_bytes=state_bytes,
            bytes_per_parameter=state_bytes / sum(local(parameter).numel() for parameter in self.model.parameters()),
            validation_loss=history.validation[-1][1],
            saved_bytes=history.saved_bytes,
            median_step_seconds=median,
            tokens_per_second=self.config.tokens_per_step / median,
            history=history,
            unit=self.corpus.unit,
        )


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
