"""The training loop: a run's model and optimizer, one step of it, its validation, and two runs in turn."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from .. import memory
from ..compression.swap import compress
from .config import BASELINES, FREE_ON_RESUME, ArgumentError, TrainConfig
from .data import Corpus, step_batches, validation_batches
from .model import GPT

FORMAT = 1


class Diverged(RuntimeError):
    """The training loss is no longer a finite number."""


@dataclasses.dataclass
class History:
    """The measurements of a run so far; part of its checkpoints, so that a resumed run reports on all its steps.

    train_loss, seconds: one entry per step. validation: (step, loss) pairs. Losses are in nats per byte.
    peak_bytes: tensor bytes of the last step; saved_bytes: what the forward pass of its first micro-batch saves for
        the backward pass. Counting slows that step down, so it is left out of the speed.
    """

    train_loss: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    peak_bytes: int | None = None
    saved_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class RunResult:
    """A finished run in figures; losses are nats per byte, tokens_per_second is that of the median step."""

    optimizer: str
    activations: str
    parameters: int
    optimizer_bytes: int
    bytes_per_parameter: float
    validation_loss: float
    peak_bytes: int
    saved_bytes: int
    median_step_seconds: float
    tokens_per_second: float
    history: History


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices (2-D or more) decay, biases and norms do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def build_optimizer(name: str, model: nn.Module, *, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """The optimizer of ``config.OPTIMIZERS`` over ``decay_groups``; torch's own are its fused ones."""
    groups = decay_groups(model, weight_decay)
    if name == "torch-adamw":
        return torch.optim.AdamW(groups, lr=lr, fused=True)
    if name == "torch-adam":
        return torch.optim.Adam(groups, lr=lr, fused=True)
    from .. import optim

    classes: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adamw8bit": optim.AdamW8bit,
        "adam8bit": optim.Adam8bit,
        "lion8bit": optim.Lion8bit,
        "lamb8bit": optim.LAMB8bit,
        "lars8bit": optim.LARS8bit,
        "adamw": optim.AdamW,
        "adam": optim.Adam,
        "lion": optim.Lion,
        "lamb": optim.LAMB,
        "lars": optim.LARS,
    }
    return classes[name](groups, lr=lr)


def warmup_cosine(optimizer: torch.optim.Optimizer, *, warmup: int, steps: int) -> LRScheduler:
    """lr * (t + 1) / (warmup + 1) for t < warmup, then a cosine from lr to lr / 10 at the last step."""
    lr = optimizer.param_groups[0]["lr"]
    linear = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    cosine = CosineAnnealingLR(optimizer, T_max=steps - warmup, eta_min=lr / 10)
    return SequentialLR(optimizer, [linear, cosine], milestones=[warmup])


def resolve_device(config: TrainConfig) -> torch.device:
    """The device to train on. Raises ArgumentError where it is absent or cannot do what --amp asks."""
    name = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ArgumentError("device", f"{name!r} given; allowed: cpu, cuda, cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            others = f", cuda:0 to cuda:{count - 1}" if count else ""
            raise ArgumentError("device", f"{name!r} given, of {count} CUDA devices; allowed: cpu{others}")
        if config.amp == "bf16" and not torch.cuda.is_bf16_supported():
            raise ArgumentError("amp", f"'bf16' given, which {name!r} does not support; allowed: fp16, off")
    return device


class Trainer:
    """Model, optimizer, schedule and measurements of one run.

    Seeds torch's global generators with config.seed, from which the model's initial values come; batches
    depend on the seed and the step alone. ``step()`` and ``evaluate()`` advance the run; ``state_dict()`` is
    all that is needed to continue it: bit for bit on the CPU with the same number of threads, and on CUDA with
    deterministic kernels (``torch.use_deterministic_algorithms``).
    """

    def __init__(self, config: TrainConfig, corpus: Corpus) -> None:
        config.validate()
        self.device = resolve_device(config)
        self.config = config
        self.corpus = corpus
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        layers, heads, width = config.shape
        self.model = GPT(
            layers=layers,
            heads=heads,
            width=width,
            seq_len=config.seq_len,
            checkpoint_activations=config.checkpoint_activations,
        ).to(self.device)
        compress(self.model, config.activation_bits, linear=config.linear_keep)
        self.optimizer = build_optimizer(
            config.optimizer, self.model, lr=config.peak_lr, weight_decay=config.decay
        )
        self.scheduler = warmup_cosine(self.optimizer, warmup=config.warmup_steps, steps=config.steps)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.amp == "fp16")
        self.steps_done = 0
        self.history = History()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte, computed in fp32."""
        inputs, targets = inputs.to(self.device), targets.to(self.device)
        dtype = torch.float16 if self.config.amp == "fp16" else torch.bfloat16
        with torch.autocast(self.device.type, dtype=dtype, enabled=self.config.amp != "off"):
            logits = self.model(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def _counted_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        forward = lambda: losses.append(self.loss(inputs, targets))  # noqa: E731
        self.history.saved_bytes = memory.saved_bytes(forward, self.model)
        return losses[0]

    def _update(self, counted: bool = False) -> float:
        """Forward and backward over the step's micro-batches, then the optimizer; the mean loss.

        counted: the first forward pass also counts what it saves for backward.
        """
        config = self.config
        batches = step_batches(
            self.corpus.train,
            seed=config.seed,
            step=self.steps_done,
            accumulate=config.micro_batches,
            batch_size=config.batch_size,
            seq_len=config.seq_len,
        )
        total = torch.zeros((), device=self.device)
        for i, (inputs, targets) in enumerate(batches):
            forward = self._counted_loss if counted and i == 0 else self.loss
            loss = forward(inputs, targets) / config.micro_batches
            self.scaler.scale(loss).backward()
            total += loss.detach()
        if config.clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total.item()

    def step(self) -> float:
        """One optimizer step; returns its training loss. The last one also measures the peak of tensor bytes.

        Raises Diverged where the loss is not finite.
        """
        began = time.perf_counter()
        if self.steps_done + 1 == self.config.steps:
            losses: list[float] = []
            self.history.peak_bytes = memory.peak_bytes(
                lambda: losses.append(self._update(counted=True)), self.model, self.optimizer
            )
            loss = losses[0]
        else:
            loss = self._update()
        self.history.seconds.append(time.perf_counter() - began)
        self.history.train_loss.append(loss)
        self.steps_done += 1
        if not math.isfinite(loss):
            raise Diverged(f"{self.config.optimizer}: the loss is {loss} at step {self.steps_done}")
        return loss

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the validation windows (always the same ones), also recorded in the history."""
        config = self.config
        batches = validation_batches(
            self.corpus.validation,
            tokens=config.eval_tokens,
            batch_size=config.batch_size,
            seq_len=config.seq_len,
        )
        total = count = 0.0
        for inputs, targets in batches:
            total += self.loss(inputs, targets).item() * targets.numel()
            count += targets.numel()
        loss = total / count
        self.history.validation.append((self.steps_done, loss))
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors, numbers and strings: what ``torch.load(weights_only=True)`` reads back."""
        return {
            "format": FORMAT,
            "config": dataclasses.asdict(self.config),
            "corpus": self.corpus.digest,
            "step": self.steps_done,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": torch.get_rng_state(),
            "rng_cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "history": dataclasses.asdict(self.history),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the run of ``state``. Where options differ, raises ArgumentError and changes nothing."""
        saved = TrainConfig(**state["config"])
        for field in dataclasses.fields(TrainConfig):
            given, before = getattr(self.config, field.name), getattr(saved, field.name)
            if field.name not in FREE_ON_RESUME and given != before:
                raise ArgumentError(
                    field.name, f"{given} given; allowed: {before}, with which the resumed run began"
                )
        if state["corpus"] != self.corpus.digest:
            raise ArgumentError(
                "data",
                f"{self.corpus.name!r} given; allowed: the text with which the resumed run began, unchanged",
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"])
        if self.device.type == "cuda" and state["rng_cuda"] is not None:
            torch.cuda.set_rng_state(state["rng_cuda"], self.device)
        self.steps_done = state["step"]
        self.history = History(**state["history"])

    def result(self) -> RunResult:
        """The figures of a run whose last step is done and validated."""
        history = self.history
        if history.peak_bytes is None or history.saved_bytes is None or not history.validation:
            raise RuntimeError(f"no result after {self.steps_done} of {self.config.steps} steps")
        median = statistics.median(history.seconds[:-1] or history.seconds)
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        state_bytes = memory.optimizer_bytes(self.optimizer)
        return RunResult(
            optimizer=self.config.optimizer,
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
        )


def comparison(config: TrainConfig) -> list[TrainConfig]:
    """The same run with the optimizer that ``BASELINES`` names and torch's own layers, and ``config`` itself."""
    baseline = BASELINES.get(config.optimizer)
    if baseline is None:
        raise ArgumentError(
            "compare", f"given with optimizer {config.optimizer}; allowed with: {', '.join(BASELINES)}"
        )
    plain = dataclasses.replace(config, optimizer=baseline, activation_bits=None, linear_keep=None)
    return [plain, config]


def run(
    trainers: Sequence[Trainer], on_step: Callable[[Trainer], None] = lambda trainer: None
) -> list[RunResult]:
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
