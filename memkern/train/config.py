"""The options of a training run: one frozen dataclass, its defaults and its checks. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..techniques.options import (
    LR_RULES,
    NOT_NEGATIVE,
    OPTIMIZERS,
    PARALLEL,
    POSITIVE,
    RATE,
    WARMUP_FROM,
    OptionError,
    Techniques,
    at_least,
    check_fields,
    option,
)

# The byte-level presets: layers, heads, width. Every other name is a model of transformers.
MODELS = {
    "byte-tiny": (4, 4, 256),
    "byte-small": (6, 8, 512),
    "byte-gpt2": (12, 12, 768),
    "byte-gpt2-medium": (24, 16, 1024),
}

# Default learning rate and weight decay. Adam adds the decay to its gradient, where 0.1 would stall it. Lion updates
# every element by the learning rate: a tenth of AdamW's, and ten times the decay, so that their product is the same.
# With LAMB and LARS the rate is the length of an update over the norm of its matrix. Muon's updates are made as long as
# AdamW's.
RATES = {
    "adamw": (1e-3, 0.1),
    "adam": (1e-3, 0.0),
    "lion": (1e-4, 1.0),
    "sgd": (3e-2, 1e-4),
    "lamb": (1e-2, 0.1),
    "lars": (3e-2, 1e-4),
    "muon": (1e-3, 0.1),
}

# RATES are those of small models from random weights: factors for transformers' models.
FROM_CONFIG = 0.3  # AdamW 3e-4
FINE_TUNING = 0.05  # AdamW 5e-5

# Options that presets do not have, and options that models of transformers do not have.
TRANSFORMERS_ONLY = ("from_config", "bytes", "dropout")
PRESETS_ONLY = ("layers", "heads", "width")

# Options that may differ on resume: they do not change the losses (device and parallel only in the last bits).
FREE_ON_RESUME = frozenset(
    ("data", "device", "eval_every", "save_every", "checkpointing", "parallel", "weights_on_host", "pin_memory")
)

# The headings of --help.
DATA, TRAINING, TECHNIQUES = "data and model", "training", "techniques that save memory"
RATES_AND_BATCHES, FILES = "rates and large batches", "files and comparison"

_SIZES = "; ".join(f"{name}: {'x'.join(map(str, shape))}" for name, shape in MODELS.items())


def scale_lr(base_lr: float, batch_factor: float, rule: str = "sqrt") -> float:
    """The learning rate for a batch ``batch_factor`` times the one that ``base_lr`` was found for.

    ::

        linear:  base_lr * batch_factor          for SGD: Goyal et al., arXiv 1706.02677
        sqrt:    base_lr * sqrt(batch_factor)    for LAMB: You et al., arXiv 1904.00962, section 4 (after Krizhevsky,
                                                 arXiv 1404.5997); for Adam: Malladi et al., arXiv 2205.10287
        none:    base_lr

    Large batches want a gradual warm-up to the scaled rate: over the first 5 epochs (Goyal et al.), or over a share of
    the epochs in proportion to the batch (You et al.). torch's schedulers do it: ``SequentialLR`` of ``LinearLR`` and
    what follows (:func:`memkern.train.loop.warmup_cosine`).

    Raises:
        ValueError: an unknown rule, a rate below 0, a factor that is not above 0.
    """
    if rule not in LR_RULES:
        raise ValueError(f"rule must be one of {', '.join(LR_RULES)}, got {rule!r}")
    if not base_lr >= 0:
        raise ValueError(f"base_lr must be 0 or more, got {base_lr}")
    if not 0 < batch_factor < math.inf:
        raise ValueError(f"batch_factor must be above 0, got {batch_factor}")
    return base_lr * {"none": 1.0, "linear": batch_factor, "sqrt": math.sqrt(batch_factor)}[rule]


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run. ``None`` stands for a default that depends on other fields; the properties resolve it.

    ``python -m memkern train --help`` describes each field under the name of its flag; beside that:

    data: empty for the running Python's library (``data.load_corpus``).
    model: a preset of ``MODELS``, whose sizes layers, heads and width override; or a folder that transformers saved, or
        a name on the Hugging Face Hub.
    techniques: those that save memory, and the optimizer, see :class:`memkern.Techniques`.
    lr (peak) and weight_decay: default ``RATES``, lr for models of transformers times FINE_TUNING or FROM_CONFIG.
    steps: optimizer steps, each over ``batch_factor * techniques.accumulation`` micro-batches of
        ``techniques.micro_batch`` windows, in whatever number of processes.
    batch_factor: how many times as large a step's batch is as the one that lr is for, which lr_rule then scales
        (``scale_lr``). The command line's default is the number of processes.
    warmup: default a tenth of the steps, at most 100; a cosine to lr / 10 follows.
    """

    techniques: Techniques = dataclasses.field(default=Techniques(state_bits=8, micro_batch=4))
    data: tuple[str, ...] = option(
        (),
        "text files, JSON lines (.jsonl) and folders of them to train on",
        group=DATA, metavar="PATH", shown="Python's standard library",
    )  # fmt: skip
    model: str = option(
        "byte-tiny",
        f"byte-level GPT of layers x heads x width, {_SIZES}; or transformers' model in a folder or on the Hub",
        group=DATA, metavar="NAME|FOLDER",
    )  # fmt: skip
    from_config: bool = option(
        False, "random weights in place of those of the folder or the Hub", (False, True), group=DATA
    )
    bytes: bool = option(
        False,
        "UTF-8 bytes as tokens, not the model's tokenizer",
        (False, True),
        group=DATA,
    )
    text_field: str = option("text", "field of JSON lines with the text", group=DATA, metavar="NAME")
    dropout: float | None = option(None, "all dropout rates of the model", RATE, group=DATA, shown="the model's own")
    layers: int | None = option(
        None, "number of a byte-level GPT's blocks", at_least(1), group=DATA, shown="the model's"
    )
    heads: int | None = option(None, "its attention heads", at_least(1), group=DATA, shown="the model's")
    width: int | None = option(None, "the size of its residual stream", at_least(1), group=DATA, shown="the model's")
    seq_len: int = option(128, "tokens in a window", at_least(1), group=DATA)
    steps: int = option(500, "optimizer steps", at_least(1), group=TRAINING)
    seed: int = option(0, "initial values and batches", at_least(0, 2**63 - 1), group=TRAINING)
    device: str | None = option(
        None, "cpu, cuda or cuda:N", group=TRAINING, metavar="NAME", shown="cuda if there is one"
    )
    parallel: str = option("ddp", "of several processes: DDP, or FSDP2's shards", PARALLEL, group=TRAINING)
    eval_every: int = option(50, "steps between validations; the last step has one", at_least(1), group=TRAINING)
    eval_tokens: int = option(16384, "tokens of validation text", at_least(1), group=TRAINING)
    pin_memory: bool = option(
        True, "pin the host's memory of --weights-on-host; without, copies are slower and do not overlap",
        (False, True), group=TECHNIQUES,
    )  # fmt: skip
    lr: float | None = option(
        None, "peak learning rate", POSITIVE, group=RATES_AND_BATCHES,
        shown="1e-3, Lion 1e-4, SGD and LARS 3e-2, LAMB 1e-2; a model of transformers 0.3 of it from random weights, "
        "else 0.05",
    )  # fmt: skip
    weight_decay: float | None = option(
        None, "decay of matrices", NOT_NEGATIVE, group=RATES_AND_BATCHES,
        shown="AdamW and LAMB 0.1, Adam 0, Lion 1, SGD and LARS 1e-4",
    )  # fmt: skip
    clip: float | None = option(
        None, "largest global gradient norm, 0 for none", NOT_NEGATIVE, group=RATES_AND_BATCHES,
        shown="1, with --step-in-backward 0",
    )  # fmt: skip
    batch_factor: int = option(
        1, "how many of --batch-size are in a step; the learning rate is scaled by --lr-rule", at_least(1),
        group=RATES_AND_BATCHES, shown="the number of processes",
    )  # fmt: skip
    lr_rule: str = option("sqrt", "what the learning rate is multiplied by for it", LR_RULES, group=RATES_AND_BATCHES)
    warmup: int | None = option(
        None, "steps of linear warm-up", at_least(0), group=RATES_AND_BATCHES, shown="a tenth, at most 100"
    )
    warmup_from: str = option(
        "zero", "the rate it begins with: zero, or base, that before --lr-rule scaled it", WARMUP_FROM,
        group=RATES_AND_BATCHES,
    )  # fmt: skip
    save_every: int = option(100, "steps between checkpoints", at_least(1), group=FILES)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """The config that ``dataclasses.asdict`` made a dict of."""
        return cls(**values | {"techniques": Techniques(**values["techniques"])})

    def replace(self, **changes: Any) -> TrainConfig:
        """A copy with other values, of its own fields and of those of its techniques."""
        names = [field.name for field in dataclasses.fields(Techniques) if field.name in changes]
        techniques = changes.pop("techniques", self.techniques)
        if names:
            techniques = techniques.replace(**{name: changes.pop(name) for name in names})
        return dataclasses.replace(self, techniques=techniques, **changes)

    def options(self) -> dict[str, Any]:
        """Every option by the name of its flag: the techniques' and the other fields."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        techniques = values.pop("techniques")
        return values | {field.name: getattr(techniques, field.name) for field in dataclasses.fields(Techniques)}

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
        return RATES[self.techniques.algorithm][0] * factor

    @property
    def peak_lr(self) -> float:
        return scale_lr(self.base_lr, self.batch_factor, self.lr_rule)

    @property
    def decay(self) -> float:
        return RATES[self.techniques.algorithm][1] if self.weight_decay is None else self.weight_decay

    @property
    def max_norm(self) -> float:
        """The norm that gradients are clipped to, 0 for no clipping."""
        if self.clip is None:
            return 0.0 if self.techniques.step_in_backward else 1.0
        return self.clip

    @property
    def clips_in_step(self) -> bool:
        """Whether the optimizer clips (max_grad_norm): gradients that go to the host are freed during backward, or are
        read there by the step alone."""
        on_host = self.techniques.offload == "cpu" or self.techniques.weights_on_host is not None
        return on_host and self.max_norm > 0 and not self.techniques.is_torch

    @property
    def warmup_steps(self) -> int:
        return min(100, self.steps // 10) if self.warmup is None else self.warmup

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a step."""
        return self.batch_factor * self.techniques.accumulation

    @property
    def batch_size(self) -> int:
        """The number of windows of a step."""
        return self.micro_batches * self.techniques.micro_batch

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    def baseline(self) -> TrainConfig:
        """The same run with torch's optimizer, or with 32-bit states where torch has none, and torch's own layers.

        Raises OptionError for an optimizer that is the baseline itself.
        """
        techniques = self.techniques
        torchs = f"torch-{techniques.optimizer}"
        if torchs not in OPTIMIZERS and techniques.state_bits == 32:
            with_torch = ", ".join(name.removeprefix("torch-") for name in OPTIMIZERS if name.startswith("torch-"))
            raise OptionError(
                "compare",
                f"given with {techniques.optimizer} and 32-bit states; allowed with 8-bit states, or with {with_torch}",
            )
        plain = Techniques(
            precision="fp32" if techniques.precision == "bf16" else techniques.precision,
            optimizer=torchs if torchs in OPTIMIZERS else techniques.optimizer,
            checkpointing=techniques.checkpointing,
            checkpoint_bits=techniques.checkpoint_bits,
            checkpoint_every=techniques.checkpoint_every,
            loss_chunk=techniques.loss_chunk,
            micro_batch=techniques.micro_batch,
            accumulation=techniques.accumulation,
        )
        return self.replace(techniques=plain, clip=self.max_norm)

    def validate(self) -> None:
        """Raises OptionError for the first option that cannot be used. Looks at no file and no device."""
        check_fields(self)
        if self.warmup_steps >= self.steps and self.warmup_steps > 0:
            raise OptionError("warmup", f"{self.warmup} given; allowed: fewer than the {self.steps} steps")
        check_model_options(self)
        check_techniques(self)


def check_model_options(config: TrainConfig) -> None:
    """Raises OptionError for an option that the model does not have."""
    if not config.is_preset:
        for name in PRESETS_ONLY:
            if getattr(config, name) is not None:
                presets = ", ".join(MODELS)
                raise OptionError(name, f"given with --model {config.model}; allowed with {presets}")
        return
    for name in TRANSFORMERS_ONLY:
        if getattr(config, name) not in (None, False):
            text = f"given with --model {config.model}, a byte-level preset; allowed with models of transformers"
            raise OptionError(name, text)
    _, heads, width = config.shape
    if width % heads and config.heads is not None:
        raise OptionError("heads", f"{heads} given; allowed: divisors of the width, {width}")
    if width % heads:
        raise OptionError("width", f"{width} given; allowed: multiples of the heads, {heads}")


def check_techniques(config: TrainConfig) -> None:
    """Raises OptionError for an option and a technique that exclude each other."""
    techniques = config.techniques
    if techniques.step_in_backward:
        if config.max_norm > 0:
            text = "given with --step-in-backward; allowed: 0: the norm of all gradients is not known before the last"
            raise OptionError("clip", f"{config.clip} {text}")
        if config.batch_factor > 1 and techniques.weights_on_host is None:  # else it is the number of processes
            text = "given with --step-in-backward; allowed: 1: gradients are freed as soon as they are there"
            raise OptionError("batch_factor", f"{config.batch_factor} {text}")
