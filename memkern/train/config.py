"""The options of a training run: one frozen dataclass, its defaults and its checks. Imports no torch."""

from __future__ import annotations

import dataclasses
import math

from ..planner.techniques import Techniques
from .large_batch import LR_RULES, scale_lr

# The byte-level presets: layers, heads, width. Every other name is a model of transformers.
MODELS = {
    "byte-tiny": (4, 4, 256),
    "byte-small": (6, 8, 512),
    "byte-gpt2": (12, 12, 768),
    "byte-gpt2-medium": (24, 16, 1024),
}

# Default learning rate and weight decay. Adam adds the decay to its gradient, where 0.1 would stall it. Lion updates
# every element by the learning rate: a tenth of AdamW's, and ten times the decay, so that their product is the same.
# With LAMB and LARS the rate is the length of an update over the norm of its matrix.
OPTIMIZERS = {
    "adamw8bit": (1e-3, 0.1),
    "adam8bit": (1e-3, 0.0),
    "lion8bit": (1e-4, 1.0),
    "sgd8bit": (3e-2, 1e-4),
    "lamb8bit": (1e-2, 0.1),
    "lars8bit": (3e-2, 1e-4),
    "adamw": (1e-3, 0.1),
    "adam": (1e-3, 0.0),
    "lion": (1e-4, 1.0),
    "sgd": (3e-2, 1e-4),
    "lamb": (1e-2, 0.1),
    "lars": (3e-2, 1e-4),
    "torch-adamw": (1e-3, 0.1),
    "torch-adam": (1e-3, 0.0),
    "torch-sgd": (3e-2, 1e-4),
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
    "sgd8bit": "torch-sgd",
    "sgd": "torch-sgd",
}

# OPTIMIZERS' rates are those of small models from random weights: factors for transformers' models.
FROM_CONFIG = 0.3  # AdamW 3e-4
FINE_TUNING = 0.05  # AdamW 5e-5

AMP = ("off", "bf16", "fp16")
DTYPES = ("fp32", "bf16")
MASTER_WEIGHTS = ("none", "fp32", "bf16+16", "bf16+8")
CHECKPOINTING = ("none", "blocks", "sqrt")
SAVED_BITS = ("none", "exact", "8")
GRADIENT_ROUNDING = ("nearest", "stochastic")
WARMUP_FROM = ("zero", "base")
PARALLEL = ("ddp", "fsdp")

CHOICES = {
    "optimizer": tuple(OPTIMIZERS),
    "amp": AMP,
    "dtype": DTYPES,
    "master_weights": MASTER_WEIGHTS,
    "checkpointing": CHECKPOINTING,
    "saved_bits": SAVED_BITS,
    "gradient_rounding": GRADIENT_ROUNDING,
    "lr_rule": LR_RULES,
    "warmup_from": WARMUP_FROM,
    "parallel": PARALLEL,
}
COUNTS = (
    *("layers", "heads", "width", "seq_len", "steps", "batch_size", "accumulate", "batch_factor"),
    *("loss_chunk", "threads", "eval_every", "eval_tokens", "save_every"),
)

# What a preset has not, and what a model of transformers has not.
TRANSFORMERS_ONLY = ("from_config", "bytes", "label_field", "dropout")
PRESETS_ONLY = ("layers", "heads", "width")

# Options that may differ on resume: they do not change the losses (threads, device and parallel only in the last
# bits). epochs and warmup_epochs have become steps.
FREE_ON_RESUME = frozenset(
    {
        *("data", "device", "threads", "eval_every", "save_every", "checkpointing", "workers", "parallel"),
        *("epochs", "warmup_epochs"),
    }
)


# Options whose None stands for a default, and the property that has the value in use.
DEFAULTED = {"lr": "base_lr", "weight_decay": "decay", "clip": "max_norm", "warmup": "warmup_steps"}


class ArgumentError(ValueError):
    """An option that cannot be used: which one (the field's name), what was given and what is allowed."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name
        self.message = message


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run. ``None`` stands for a default that depends on another field; the properties resolve it.

    data: files and folders of text, JSONL, CSV, TSV and Parquet, empty for the running Python's library
        (``build.load``).
    model: a preset of ``MODELS``, whose sizes layers, heads and width override; or a folder that transformers saved, or
        a name on the Hugging Face Hub. from_config: random weights. bytes: UTF-8 bytes in place of the model's
        tokenizer. dropout: every dropout rate of the model, default the model's own.
    text_field: the text's field in these tables, default "text". label_field: where given, a sequence classifier is
        trained to find this field.
    seq_len: tokens in a window; of a classifier's texts, the most that are taken.
    optimizer: a key of ``OPTIMIZERS``. lr (peak) and weight_decay: default ``OPTIMIZERS[optimizer]``, lr for models of
        transformers times FINE_TUNING or FROM_CONFIG.
    steps: optimizer steps, each over batch_factor * accumulate micro-batches of batch_size windows, in whatever number
        of processes. epochs: passes over the text, in place of steps.
    batch_factor: how many times as large a step's batch is as the one that lr is for, which lr_rule then scales
        (``large_batch.scale_lr``). The command line's default is the number of processes.
    clip: largest global gradient norm, 0 for no clipping; default 1, with step_in_backward 0.
    warmup: steps of linear warm-up, default a tenth of the steps, at most 100; a cosine to lr / 10 follows.
        warmup_epochs: in epochs. warmup_from: "zero", or "base", the rate before lr_rule scaled it.
    amp: autocast type of the forward pass; fp16 adds a GradScaler. dtype: that of the weights; master_weights: what an
        optimizer keeps beside weights in bf16, a copy in fp32 or the rounding errors in 16 or 8 bits.
    gradient_rounding: of the sums over micro-batches in bf16; "stochastic" is :func:`memkern.optim.accumulate`.
    checkpointing: save the inputs of "blocks", or of every sqrt(L)-th of L blocks ("sqrt"), and recompute the rest.
    activation_bits: bits per element that activations save for the backward pass, default torch's activations.
    linear_keep: share of the tokens that linear layers save for their weights' gradients, default all.
    saved_bits: "8" or "exact": ``memkern.quantize_saved`` around the forward pass.
    loss_chunk: classes whose logits are in memory at a time, default all.
    step_in_backward: each parameter is updated as soon as it has its gradient, which is then freed.
    offload: the optimizer's states in host memory, where the step is computed.
    eval_every: steps between validations (the last step always has one) over at most eval_tokens tokens.
    device: default cuda where there is one, else cpu. threads: CPU threads, default torch's own choice.
    workers: processes that prepare batches. parallel: how several processes train, DDP or FSDP2.
    """

    data: tuple[str, ...] = ()
    model: str = "byte-tiny"
    from_config: bool = False
    bytes: bool = False
    dropout: float | None = None
    text_field: str | None = None
    label_field: str | None = None
    layers: int | None = None
    heads: int | None = None
    width: int | None = None
    seq_len: int = 128
    optimizer: str = "adamw8bit"
    steps: int = 500
    epochs: float | None = None
    batch_size: int = 4
    accumulate: int = 1
    batch_factor: int = 1
    lr_rule: str = "sqrt"
    checkpointing: str = "none"
    activation_bits: int | None = None
    linear_keep: float | None = None
    saved_bits: str = "none"
    loss_chunk: int | None = None
    step_in_backward: bool = False
    offload: bool = False
    amp: str = "off"
    dtype: str = "fp32"
    master_weights: str = "none"
    gradient_rounding: str = "nearest"
    lr: float | None = None
    weight_decay: float | None = None
    clip: float | None = None
    warmup: int | None = None
    warmup_epochs: float | None = None
    warmup_from: str = "zero"
    seed: int = 0
    device: str | None = None
    threads: int | None = None
    workers: int = 0
    parallel: str = "ddp"
    eval_every: int = 50
    eval_tokens: int = 16384
    save_every: int = 100

    @property
    def is_preset(self) -> bool:
        return self.model in MODELS

    @property
    def shape(self) -> tuple[int, int, int]:
        """(layers, heads, width) of a preset."""
        layers, heads, width = MODELS[self.model]
        return self.layers or layers, self.heads or heads, self.width or width

    @property
    def base_lr(self) -> float:
        """The rate before lr_rule."""
        if self.lr is not None:
            return self.lr
        factor = 1.0 if self.is_preset else FROM_CONFIG if self.from_config else FINE_TUNING
        return OPTIMIZERS[self.optimizer][0] * factor

    @property
    def peak_lr(self) -> float:
        return scale_lr(self.base_lr, self.batch_factor, self.lr_rule)

    @property
    def decay(self) -> float:
        return OPTIMIZERS[self.optimizer][1] if self.weight_decay is None else self.weight_decay

    @property
    def max_norm(self) -> float:
        """The gradients' norm, 0 for no clipping."""
        if self.clip is None:
            return 0.0 if self.step_in_backward else 1.0
        return self.clip

    @property
    def clips_in_step(self) -> bool:
        """Whether the optimizer clips (max_grad_norm): gradients that go to the host are gone after backward."""
        return self.offload and self.max_norm > 0 and not self.optimizer.startswith("torch-")

    @property
    def warmup_steps(self) -> int:
        return min(100, self.steps // 10) if self.warmup is None else self.warmup

    @property
    def activations(self) -> str:
        """What is saved for the backward pass, in words."""
        if self.activation_bits:
            words = [f"{self.activation_bits}-bit {'GELU' if self.is_preset else 'activations'}"]
        else:
            words = ["GELU" if self.is_preset else "the model's"]
        if self.linear_keep is not None:
            words.append(f"{100 * self.linear_keep:g} % of tokens")
        if self.saved_bits != "none":
            words.append("saved once" if self.saved_bits == "exact" else "saved in 8 bits")
        return ", ".join(words)

    @property
    def techniques(self) -> Techniques:
        """What a step does to need less memory, as the planner has it."""
        return Techniques(
            precision="bf16" if self.dtype == "bf16" else "fp32" if self.amp == "off" else "amp",
            optimizer=self.optimizer.removesuffix("8bit"),
            state_bits=8 if self.optimizer.endswith("8bit") else 32,
            activation_bits=self.activation_bits,
            saved_bits={"none": None, "exact": "exact", "8": 8}[self.saved_bits],
            randomized_linear=self.linear_keep or False,
            checkpointing=self.checkpointing,
            master_weights=None if self.master_weights == "none" else self.master_weights,
            step_in_backward=self.step_in_backward,
            loss_chunk=self.loss_chunk,
            offload=self.offload,
            micro_batch=self.batch_size,
            accumulation=self.micro_batches,
        )

    @property
    def micro_batches(self) -> int:
        """Of batch_size windows, in a step."""
        return self.batch_factor * self.accumulate

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batches * self.batch_size * self.seq_len

    def validate(self) -> None:
        """Raises ArgumentError for the first option that is out of range. Looks at no file and no device."""
        for name, allowed in CHOICES.items():
            given = getattr(self, name)
            if given not in allowed:
                raise ArgumentError(name, f"{given!r} given; allowed: {', '.join(allowed)}")
        check_ranges(self)
        check_model_options(self)
        check_techniques(self)


def check_ranges(config: TrainConfig) -> None:
    """Raises ArgumentError for the first number that is out of range."""
    for fields, low in ((COUNTS, 1), (("seed", "warmup", "workers"), 0)):
        for name in fields:
            given = getattr(config, name)
            if given is not None and (type(given) is not int or given < low):
                raise ArgumentError(name, f"{given!r} given; allowed: an integer of {low} or more")
    if config.warmup_steps >= config.steps and config.warmup_steps > 0:
        name = "warmup" if config.warmup_epochs is None else "warmup_epochs"
        given = getattr(config, name)
        raise ArgumentError(name, f"{given:g} given; allowed: fewer than the {config.steps} steps")
    for name in ("lr", "weight_decay", "clip", "warmup_epochs"):
        given = getattr(config, name)
        if given is not None and not (math.isfinite(given) and given >= 0):
            raise ArgumentError(name, f"{given} given; allowed: a finite number of 0 or more")
    for name in ("lr", "epochs"):
        given = getattr(config, name)
        if given is not None and not (math.isfinite(given) and given > 0):
            raise ArgumentError(name, f"{given:g} given; allowed: a finite number above 0")
    bits, keep, dropout = config.activation_bits, config.linear_keep, config.dropout
    if bits is not None and (type(bits) is not int or not 1 <= bits <= 4):
        raise ArgumentError("activation_bits", f"{bits!r} given; allowed: 1 to 4")
    if keep is not None and not 0 < keep <= 1:
        raise ArgumentError("linear_keep", f"{keep} given; allowed: above 0, at most 1")
    if dropout is not None and not 0 <= dropout < 1:
        raise ArgumentError("dropout", f"{dropout} given; allowed: 0 or more, below 1")


def check_model_options(config: TrainConfig) -> None:
    """Raises ArgumentError for an option that the model has not."""
    if not config.is_preset:
        for name in PRESETS_ONLY:
            if getattr(config, name) is not None:
                presets = ", ".join(MODELS)
                raise ArgumentError(name, f"given with --model {config.model}; allowed with {presets}")
        return
    for name in TRANSFORMERS_ONLY:
        if getattr(config, name) not in (None, False):
            text = (
                f"given with --model {config.model}, a byte-level preset; allowed with models of transformers"
            )
            raise ArgumentError(name, text)
    _, heads, width = config.shape
    if width % heads and config.heads is not None:
        raise ArgumentError("heads", f"{heads} given; allowed: divisors of the width, {width}")
    if width % heads:
        raise ArgumentError("width", f"{width} given; allowed: multiples of the heads, {heads}")


def check_techniques(config: TrainConfig) -> None:
    """Raises ArgumentError for techniques that exclude each other."""
    torch_own = config.optimizer.startswith("torch-")
    if config.dtype == "bf16" and config.amp != "off":
        raise ArgumentError("amp", f"{config.amp!r} given with --dtype bf16; allowed: off, or --dtype fp32")
    if config.master_weights != "none" and config.dtype != "bf16":
        raise ArgumentError(
            "master_weights", f"{config.master_weights!r} given; allowed with --dtype bf16, or none"
        )
    if config.master_weights != "none" and torch_own:
        raise ArgumentError(
            "master_weights", f"given with {config.optimizer}; allowed with memkern's optimizers"
        )
    if config.gradient_rounding == "stochastic":
        for name, stands, cure in (
            ("dtype", config.dtype != "bf16", "bf16"),
            ("step_in_backward", config.step_in_backward, "not with it: there is one micro-batch to a step"),
            ("offload", config.offload, "not with it: gradients are added up on the host"),
        ):
            if stands:
                text = f"{getattr(config, name)} given with --gradient-rounding stochastic; allowed: {cure}"
                raise ArgumentError(name, text)
    if config.offload and config.amp == "fp16":
        text = "'fp16' given with --offload; allowed: off, bf16: a GradScaler looks at all gradients before the step"
        raise ArgumentError("amp", text)
    if not config.step_in_backward:
        return
    for name, stands, cure in (
        ("clip", config.max_norm > 0, "0: the norm of all gradients is not known before the last"),
        ("amp", config.amp == "fp16", "off, bf16: a GradScaler looks at all gradients before the step"),
        ("accumulate", config.accumulate > 1, "1: gradients are freed as soon as they are there"),
        ("batch_factor", config.batch_factor > 1, "1: gradients are freed as soon as they are there"),
        ("offload", config.offload, "one of the two: offload frees the gradients already"),
    ):
        if stands:
            given = getattr(config, name)
            raise ArgumentError(name, f"{given} given with --step-in-backward; allowed: {cure}")
