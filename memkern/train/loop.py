"""The training loop: a run's model, optimizer and schedule, one step of it, its validation, and two runs in turn."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from .. import memory
from ..techniques.applying import apply, autocast, make_optimizer, optimizer_groups, weight_dtype
from ..techniques.options import OptionError, spelled
from . import distributed, huggingface
from .config import FREE_ON_RESUME, TrainConfig
from .data import Corpus, load_corpus
from .model import GPT, Objective


def load(config: TrainConfig) -> Corpus:
    """Reads the text that ``config`` names, as its model needs it. Raises OptionError for what cannot be used."""
    tokenizer = None if config.is_preset else huggingface.load_tokenizer(config)
    return load_corpus(config.data, seq_len=config.seq_len, text_field=config.text_field, tokenizer=tokenizer)


def build_objective(config: TrainConfig, device: torch.device) -> Objective:
    """The model with its loss on the device, compressed, checkpointed and compiled as the techniques say.

    With weights_on_host it is on the host, and its blocks are on the device while they run.
    """
    if config.is_preset:
        model: nn.Module = GPT(*config.shape, seq_len=config.seq_len).to(weight_dtype(config))
    else:
        model = huggingface.build(config)
    objective = Objective(model.to("cpu" if config.weights_on_host else device), config.loss_chunk)
    apply(objective, config, device=device, pin_memory=config.pin_memory)
    return objective


def build_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the techniques, with weight decay for matrices; torch's Adam and AdamW are its fused ones."""
    groups = optimizer_groups(model, config, lr=config.peak_lr, weight_decay=config.decay)
    options: dict[str, Any] = {}
    if config.is_torch:
        # torch 2.13's fused SGD writes garbage into bf16 weights on a CPU, and takes no DTensors.
        options = {"foreach": False} if config.algorithm == "sgd" else {"fused": True}
    if config.clips_in_step:
        options["max_grad_norm"] = config.max_norm
    return make_optimizer(groups, config, lr=config.peak_lr, **options)


def warmup_cosine(optimizer: torch.optim.Optimizer, *, warmup: int, steps: int) -> LRScheduler:
    """A linear warm-up by iteration, lr * (t + 1) / (warmup + 1), then a cosine to lr / 10 at the last step."""
    lr = optimizer.param_groups[0]["lr"]
    if not warmup:  # torch 2.11's SequentialLR is wrong with a milestone of 0
        return CosineAnnealingLR(optimizer, T_max=steps, eta_min=lr / 10)
    linear = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    cosine = CosineAnnealingLR(optimizer, T_max=steps - warmup, eta_min=lr / 10)
    return SequentialLR(optimizer, [linear, cosine], milestones=[warmup])


def resolve_device(config: TrainConfig) -> torch.device:
    """The device to train on; of several processes each has the CUDA device of its local rank.

    Raises OptionError where it is absent.
    """
    count = torch.cuda.device_count()
    name = config.device or ("cuda" if count else "cpu")
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    if name not in ("cpu", *(f"cuda:{index}" for index in range(count))):
        raise OptionError("device", f"{name!r} given; allowed: cpu, and cuda or cuda:N of {count} CUDA devices")
    return torch.device(name)


@dataclasses.dataclass
class History:
    """The measurements of a run so far; part of its checkpoints, so that a resumed run reports on all its steps.

    train_loss, seconds: one entry per step. validation: (step, loss) pairs. Losses are in nats per token.
    saved_bytes: what the forward pass of the last step's first micro-batch saves for the backward pass.
    """

    train_loss: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    saved_bytes: int = 0


FORMAT = [[field.name for field in dataclasses.fields(cls)] for cls in (TrainConfig, History)]
"""The format of checkpoints: those of a version with other options are refused."""


class Trainer:
    """Model, optimizer, schedule and measurements of one run, or of one process's share of it.

    Seeds torch's global generators with config.seed, from which the model's initial values come; batches
    depend on the seed and the step alone. ``step()`` and ``evaluate()`` advance the run; ``state_dict()`` is
    all that is needed to continue it: bit for bit on the CPU with the same number of threads and processes, and on
    CUDA with deterministic kernels (``torch.use_deterministic_algorithms``).

    Several processes of torch.distributed have the same ``config`` and ``corpus`` each, and call the same methods.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus) -> None:
        self.config, self.corpus = config, corpus
        self.device = resolve_device(config)
        distributed.check_processes(config)
        torch.manual_seed(config.seed)
        self.objective = build_objective(config, self.device)
        self.model = self.objective.model
        self.parallel = distributed.data_parallel(self.objective, config, self.device)
        self.optimizer = build_optimizer(config, self.model)
        self.scheduler = warmup_cosine(self.optimizer, warmup=config.warmup_steps, steps=config.steps)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.autocast == "fp16")
        if distributed.rank():
            torch.manual_seed(config.seed + distributed.rank())  # for dropout
        self.steps_done = 0
        self.history = History()

    def loss(self, *batch: Tensor) -> Tensor:
        """The sum of a batch's cross-entropies in nats, computed in fp32."""
        objective = self.parallel if torch.is_grad_enabled() else self.objective
        with autocast(self.config, self.device.type):
            return objective(*(tensor.to(self.device) for tensor in batch))

    def step(self) -> float:
        """One optimizer step; returns the mean loss over the targets of all processes.

        Raises FloatingPointError where the loss is not finite.
        """
        began, config, processes = time.perf_counter(), self.config, distributed.world()
        total = torch.zeros((), device=self.device)
        batches = self.corpus.step(config, self.steps_done)[distributed.rank() :: processes]
        for i, batch in enumerate(batches):
            with distributed.synchronized(self.parallel, i + 1 == len(batches), config.weights_on_host is not None):
                is_counted = i == 0 and self.steps_done + 1 == config.steps
                loss = (self._counted_loss if is_counted else self.loss)(*batch) / config.tokens_per_step
                # DDP and fully_shard average the gradients of the processes.
                self.scaler.scale(loss * processes if processes > 1 else loss).backward()
            total += loss.detach()
        if config.max_norm and not config.clips_in_step:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), config.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        if processes > 1:
            dist.all_reduce(total)
        mean = total.item()
        self.history.seconds.append(time.perf_counter() - began)
        self.history.train_loss.append(mean)
        self.steps_done += 1
        return self._finite("loss", mean)

    def _finite(self, name: str, loss: float) -> float:
        if not math.isfinite(loss):
            raise FloatingPointError(f"{self.config.label}: the {name} is {loss} at step {self.steps_done}")
        return loss

    def _counted_loss(self, *batch: Tensor) -> Tensor:
        losses: list[Tensor] = []
        self.history.saved_bytes = memory.saved_bytes(lambda: losses.append(self.loss(*batch)), self.model)
        return losses[0]

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the validation batches, in each process over all of them; recorded in the history.

        Raises FloatingPointError where it is not finite.
        """
        self.objective.eval()
        batches = self.corpus.validation_batches(self.config)
        loss = sum(self.loss(*batch).item() for batch in batches) / sum(targets.numel() for _, targets in batches)
        self.objective.train()
        self.history.validation.append((self.steps_done, self._finite("validation loss", loss)))
        return loss

    def weights(self) -> dict[str, Any]:
        """The model's state dict, without shards; all processes must call it."""
        return distributed.full(self.model.state_dict())

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
            "optimizer": distributed.full(self.optimizer.state_dict()),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": distributed.gathered(rng),
            "history": dataclasses.asdict(self.history),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the run of ``state``. Where options differ, raises OptionError and changes nothing."""
        resumed = state["config"]
        for name, given in dataclasses.asdict(self.config).items():
            if name not in FREE_ON_RESUME and given != resumed[name]:
                allowed = f"{spelled(resumed[name])}, with which the resumed run began, or a new run without --resume"
                raise OptionError(name, f"{spelled(given)} given; allowed: {allowed}")
        if state["corpus"] != self.corpus.digest:
            allowed = "the text with which the resumed run began, unchanged"
            raise OptionError("data", f"{self.corpus.name!r} given; allowed: {allowed}")
        shapes = [{name: x.shape for name, x in each.items()} for each in (self.model.state_dict(), state["model"])]
        if shapes[0] != shapes[1]:
            raise OptionError("resume", f"given a checkpoint of another model; allowed: one of {self.config.model}")
        distributed.load_full(self.model, state["model"])
        distributed.load_full_states(self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        if len(state["rng"]) == distributed.world():  # else the generators go on from the seed
            states = state["rng"][distributed.rank()]
            torch.set_rng_state(states[0])
            if self.device.type == "cuda" and len(states) > 1:
                torch.cuda.set_rng_state(states[1], self.device)
        self.steps_done = state["step"]
        self.history = History(**state["history"])

    def result(self) -> dict[str, Any]:
        """The figures of a finished run, as plain JSON values; losses in nats per token, the time of the median step.

        optimizer_bytes: of this process, which with FSDP2 has the states of its shards.
        """
        median = statistics.median(self.history.seconds[:-1] or self.history.seconds)  # the last counted saved bytes
        return {
            "optimizer": self.config.label,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "optimizer_bytes": memory.optimizer_bytes(self.optimizer),
            "validation_loss": self.history.validation[-1][1],
            "saved_bytes": self.history.saved_bytes,
            "median_step_seconds": median,
            "tokens_per_second": self.config.tokens_per_step / median,
            "history": dataclasses.asdict(self.history),
        }


def run(trainers: Sequence[Trainer], on_step: Callable[[Trainer], None] = lambda trainer: None) -> list[dict[str, Any]]:
    """Trains all to the end, a step of each in turn, so that a change in the machine's load affects them alike.

    All have the same steps. on_step is called after each step and its validation, if it had one. Returns their results.
    """
    steps, eval_every = trainers[0].config.steps, trainers[0].config.eval_every
    while trainers[0].steps_done < steps:
        for trainer in trainers:
            trainer.step()
            if trainer.steps_done % eval_every == 0 or trainer.steps_done == steps:
                trainer.evaluate()
            on_step(trainer)
    return [trainer.result() for trainer in trainers]
