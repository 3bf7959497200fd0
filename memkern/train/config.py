"""The options of a training run: one frozen dataclass, its defaults and its checks. Imports no torch."""

from __future__ import annotations

import dataclasses
import math

from .large_batch import LR_RULES, scale_lr

# layers, heads, width
MODELS = {
    "tiny": (4, 4, 256),
    "small": (6, 8, 512),
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
}

# Default learning rate and weight decay. Adam adds the decay to its gradient, where 0.1 would stall it. Lion updates
# every element by the learning rate: a tenth of AdamW's, and ten times the decay, so that their product is the same.
# With LAMB and LARS the rate is the length of an update over the norm of its matrix.
OPTIMIZERS = {
    "adamw8bit": (1e-3, 0.1),
    "adam8bit": (1e-3, 0.0),
    "lion8bit": (1e-4, 1.0),
    "lamb8bit": (1e-2, 0.1),
    "lars8bit": (3e-2, 1e-4),
    "adamw": (1e-3, 0.1),
    "adam": (1e-3, 0.0),
    "lion": (1e-4, 1.0),
    "lamb": (1e-2, 0.1),
    "lars": (3e-2, 1e-4),
    "torch-adamw": (1e-3, 0.1),
    "torch-adam": (1e-3, 0.0),
}

# The baseline of --compare. Lion, LAMB and LARS are not in torch.optim: theirs is the same optimizer with fp32 states.
BASELINES = {
    "adamw8bit": "torch-adamw",
    "adam8bit": "torch-adam",
    "lion8bit": "lion",
    "lamb8bit": "lamb",
    "lars8bit": "lars",
    "adamw": "torch-adamw",
    "adam": "torch-adam",
}

AMP = ("off", "bf16", "fp16")

COUNTS = (
    *("layers", "heads", "width", "seq_len", "steps", "batch_size", "accumulate", "batch_factor"),
    *("threads", "eval_every", "eval_tokens", "save_every"),
)

# Options that may differ on resume: they do not change the losses (threads and device only in the last bits).
FREE_ON_RESUME = frozenset(
    {"data", "device", "threads", "eval_every", "save_every", "checkpoint_activations"}
)


class ArgumentError(ValueError):
    """An option that cannot be used: which one (the field's name), what was given and what is allowed."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name
        self.message = message


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run. ``None`` stands for a default that depends on another field; the properties resolve it.

    data: files and folders of text, empty for the running Python's library (``data.load_corpus``).
    model: a preset of ``MODELS``; layers, heads and width override its sizes.
    optimizer: a key of ``OPTIMIZERS``. lr (peak) and weight_decay: default ``OPTIMIZERS[optimizer]``.
    steps: optimizer steps, each over batch_factor * accumulate * batch_size windows of seq_len bytes.
    batch_factor: how many times as large a step's batch is as the one that lr is for, which lr_rule then scales
        (``large_batch.scale_lr``).
    clip: largest global gradient norm, 0 for no clipping.
    warmup: steps of linear warm-up, default a tenth of the steps, at most 100; a cosine to lr / 10 follows.
    activation_bits: bits per element that activations save for the backward pass, default torch's activations.
    linear_keep: share of the tokens that linear layers save for their weights' gradients, default all.
    amp: autocast type of the forward pass; fp16 adds a GradScaler.
    eval_every: steps between validations (the last step always has one) over at most eval_tokens bytes.
    device: default cuda where there is one, else cpu. threads: CPU threads, default torch's own choice.
    """

    data: tuple[str, ...] = ()
    model: str = "tiny"
    layers: int | None = None
    heads: int | None = None
    width: int | None = None
    seq_len: int = 128
    optimizer: str = "adamw8bit"
    steps: int = 500
    batch_size: int = 4
    accumulate: int = 1
    batch_factor: int = 1
    lr_rule: str = "sqrt"
    checkpoint_activations: bool = False
    activation_bits: int | None = None
    linear_keep: float | None = None
    amp: str = "off"
    lr: float | None = None
    weight_decay: float | None = None
    clip: float = 1.0
    warmup: int | None = None
    seed: int = 0
    device: str | None = None
    threads: int | None = None
    eval_every: int = 50
    eval_tokens: int = 16384
    save_every: int = 100

    @property
    def shape(self) -> tuple[int, int, int]:
        """(layers, heads, width) of the model."""
        layers, heads, width = MODELS[self.model]
        return self.layers or layers, self.heads or heads, self.width or width

    @property
    def peak_lr(self) -> float:
        base = OPTIMIZERS[self.optimizer][0] if self.lr is None else self.lr
        return scale_lr(base, self.batch_factor, self.lr_rule)

    @property
    def decay(self) -> float:
        return OPTIMIZERS[self.optimizer][1] if self.weight_decay is None else self.weight_decay

    @property
    def warmup_steps(self) -> int:
        return min(100, self.steps // 10) if self.warmup is None else self.warmup

    @property
    def activations(self) -> str:
        """What is saved for the backward pass, in words."""
        bits = f"{self.activation_bits}-bit GELU" if self.activation_bits else "GELU"
        return bits if self.linear_keep is None else f"{bits}, {100 * self.linear_keep:g} % of tokens"

    @property
    def micro_batches(self) -> int:
        """Of batch_size windows, in a step."""
        return self.batch_factor * self.accumulate

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batches * self.batch_size * self.seq_len

    def validate(self) -> None:
        """Raises ArgumentError for the first option that is out of range. Looks at no file and no device."""
        for name, names in (
            ("model", MODELS),
            ("optimizer", OPTIMIZERS),
            ("amp", AMP),
            ("lr_rule", LR_RULES),
        ):
            given = getattr(self, name)
            if given not in names:
                raise ArgumentError(name, f"{given!r} given; allowed: {', '.join(names)}")
        for fields, low in ((COUNTS, 1), (("seed", "warmup"), 0)):
            for name in fields:
                given = getattr(self, name)
                if given is not None and (type(given) is not int or given < low):
                    raise ArgumentError(name, f"{given!r} given; allowed: an integer of {low} or more")
        if self.warmup_steps >= self.steps and self.warmup_steps > 0:
            raise ArgumentError("warmup", f"{self.warmup} given; allowed: fewer than the {self.steps} steps")
        for name in ("lr", "weight_decay", "clip"):
            given = getattr(self, name)
            if given is not None and not (math.isfinite(given) and given >= 0):
                raise ArgumentError(name, f"{given} given; allowed: a finite number of 0 or more")
        bits, keep = self.activation_bits, self.linear_keep
        if bits is not None and (type(bits) is not int or not 1 <= bits <= 4):
            raise ArgumentError("activation_bits", f"{bits!r} given; allowed: 1 to 4")
        if keep is not None and not 0 < keep <= 1:
            raise ArgumentError("linear_keep", f"{keep} given; allowed: above 0, at most 1")
        if self.lr == 0:
            raise ArgumentError("lr", "0 given; allowed: a finite number above 0")
        _, heads, width = self.shape
        if width % heads and self.heads is not None:
            raise ArgumentError("heads", f"{heads} given; allowed: divisors of the width, {width}")
        if width % heads:
            raise ArgumentError("width", f"{width} given; allowed: multiples of the heads, {heads}")
