"""The options of a training run: one frozen dataclass, its defaults and its checks. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..techniques.options import (
    NOT_NEGATIVE,
    OPTIMIZERS,
    PARALLEL,
    POSITIVE,
    RATE,
    OptionError,
    Techniques,
    at_least,
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
# With LAMB and LARS the rate is the length of an update over the norm of its matrix. Muon's are as long as AdamW's.
RATES = {
    "adamw": (1e-3, 0.1),
    "adam": (1e-3, 0.0),
    "lion": (1e-4, 1.0),
    "sgd": (3e-2, 1e-4),
    "lamb": (1e-2, 0.1),
    "lars": (3e-2, 1e-4),
    "muon": (1e-3, 0.1),
}

LR_RULES = {"none": lambda factor: 1.0, "sqrt": math.sqrt, "linear": float}  # of --batch-factor, to the rate's factor

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
DATA, TRAINING, TECHNIQUES, FILES = "data and model", "training", "techniques that save memory", "files and comparison"

_SIZES = "; ".join(f"{name}: {'x'.join(map(str, shape))}" for name, shape in MODELS.items())


def with_default(name: str, default: Any) -> Any:
    """A field of Techniques with another default."""
    return dataclasses.field(default=default, metadata=Techniques.__dataclass_fields__[name].metadata)


@dataclasses.dataclass(frozen=True)
class TrainConfig(Techniques):
    """One run: its techniques, and the following. ``None`` stands for a default that the properties resolve.

    ``python -m memkern train --help`` describes each field under the name of its flag. A step has ``batch_factor *
    accumulation`` micro-batches of ``micro_batch`` windows, in whatever number of processes.

    Raises OptionError for the first option that cannot be used; looks at no file and no device.
    """

    state_bits: int = with_default("state_bits", 8)
    micro_batch: int = with_default("micro_batch", 4)
    data: tuple[str, ...] = option(
        (), "text files, JSON lines (.jsonl) and folders of them to train on", group=DATA, metavar="PATH",
        shown="Python's standard library",
    )  # fmt: skip
    model: str = option(
        "byte-tiny",
        f"byte-level GPT of layers x heads x width, {_SIZES}; or transformers' model in a folder or on the Hub",
        group=DATA, metavar="NAME|FOLDER",
    )  # fmt: skip
    from_config: bool = option(False, "random weights, not the folder's or the Hub's", (False, True), group=DATA)
    bytes: bool = option(False, "UTF-8 bytes as tokens, not the model's tokenizer", (False, True), group=DATA)
    text_field: str = option("text", "field of JSON lines with the text", group=DATA, metavar="NAME")
    dropout: float | None = option(None, "all dropout rates of the model", RATE, group=DATA, shown="the model's own")
    layers: int | None = option(None, "a byte-level GPT's blocks", at_least(1), group=DATA, shown="the model's")
    heads: int | None = option(None, "its attention heads", at_least(1), group=DATA, shown="the model's")
    width: int | None = option(None, "the size of its residual stream", at_least(1), group=DATA, shown="the model's")
    seq_len: int = option(128, "tokens in a window", at_least(1), group=DATA)
    steps: int = option(500, "optimizer steps", at_least(1), group=TRAINING)
    seed: int = option(0, "initial values and batches", at_least(0, 2**63 - 1), group=TRAINING)
    device: str | None = option(None, "cpu, cuda or cuda:N", group=TRAINING, metavar="NAME", shown="cuda if any")
    parallel: str = option("ddp", "of several processes: DDP, or FSDP2's shards", PARALLEL, group=TRAINING)
    eval_every: int = option(50, "steps between validations; the last step has one", at_least(1), group=TRAINING)
    eval_tokens: int = option(16384, "tokens of validation text", at_least(1), group=TRAINING)
    pin_memory: bool = option(True, "pin the memory of --weights-on-host", (False, True), group=TECHNIQUES)
    lr: float | None = option(
        None, "peak learning rate", POSITIVE, group=TRAINING,
        shown="1e-3, Lion 1e-4, SGD and LARS 3e-2, LAMB 1e-2; transformers' 0.3 of it with --from-config, else 0.05",
    )  # fmt: skip
    weight_decay: float | None = option(
        None, "decay of matrices", NOT_NEGATIVE, group=TRAINING,
        shown="AdamW and LAMB 0.1, Adam 0, Lion 1, SGD and LARS 1e-4",
    )  # fmt: skip
    clip: float | None = option(
        None, "largest global gradient norm, 0 for none", NOT_NEGATIVE, group=TRAINING,
        shown="1, with --step-in-backward 0",
    )  # fmt: skip
    batch_factor: int = option(
        1, "how many --batch-size a step has", at_least(1), group=TRAINING, shown="the processes"
    )
    lr_rule: str = option("sqrt", "how --lr grows with --batch-factor", (*LR_RULES,), group=TRAINING)
    warmup: int | None = option(None, "linear warm-up", at_least(0), group=TRAINING, shown="a tenth, at most 100 steps")
    save_every: int = option(100, "steps between checkpoints", at_least(1), group=FILES)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in TRANSFORMERS_ONLY if self.is_preset else PRESETS_ONLY:
            if getattr(self, name) not in (None, False):
                allowed = "models of transformers" if self.is_preset else ", ".join(MODELS)
                raise OptionError(name, f"given with --model {self.model}; allowed with {allowed}")
        if self.is_preset and self.shape[2] % self.shape[1]:
            raise OptionError("heads", f"{self.shape[1]} given; allowed: divisors of the width, {self.shape[2]}")
        if self.warmup_steps >= self.steps and self.warmup_steps > 0:
            raise OptionError("warmup", f"{self.warmup} given; allowed: fewer than the {self.steps} steps")
        if self.step_in_backward and self.max_norm > 0:
            text = "given with --step-in-backward; allowed: 0: the norm of all gradients is not known before the last"
            raise OptionError("clip", f"{self.clip} {text}")

    @property
    def is_preset(self) -> bool:
        return self.model in MODELS

    @property
    def shape(self) -> tuple[int, int, int]:
        """(layers, heads, width) of a preset."""
        layers, heads, width = MODELS[self.model]
        return self.layers or layers, self.heads or heads, self.width or width

    @property
    def peak_lr(self) -> float:
        factor = 1.0 if self.is_preset else FROM_CONFIG if self.from_config else FINE_TUNING
        rate = RATES[self.algorithm][0] * factor if self.lr is None else self.lr
        return rate * LR_RULES[self.lr_rule](self.batch_factor)

    @property
    def decay(self) -> float:
        return RATES[self.algorithm][1] if self.weight_decay is None else self.weight_decay

    @property
    def max_norm(self) -> float:
        """The norm that gradients are clipped to, 0 for no clipping."""
        if self.clip is None:
            return 0.0 if self.step_in_backward else 1.0
        return self.clip

    @property
    def clips_in_step(self) -> bool:
        """Whether the optimizer clips (max_grad_norm): gradients that go to the host are freed during backward, or are
        read there by the step alone."""
        on_host = self.offload == "cpu" or self.weights_on_host is not None
        return on_host and self.max_norm > 0 and not self.is_torch

    @property
    def warmup_steps(self) -> int:
        return min(100, self.steps // 10) if self.warmup is None else self.warmup

    @property
    def batch_size(self) -> int:
        """The number of windows of a step."""
        return self.batch_factor * self.accumulation * self.micro_batch

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    def baseline(self) -> TrainConfig:
        """The same run with torch's optimizer, or with 32-bit states where torch has none, and torch's own layers.

        Raises OptionError for an optimizer that is the baseline itself.
        """
        torch_name = f"torch-{self.optimizer}"
        if torch_name not in OPTIMIZERS and self.state_bits == 32:
            raise OptionError("compare", f"given with {self.optimizer} and 32-bit states; allowed with 8-bit states")
        shared = {"checkpointing", "checkpoint_bits", "checkpoint_every", "loss_chunk", "micro_batch", "accumulation"}
        plain = {field.name: field.default for field in dataclasses.fields(Techniques) if field.name not in shared}
        plain["optimizer"] = torch_name if torch_name in OPTIMIZERS else self.optimizer
        plain["precision"] = self.precision if self.autocast else "fp32"
        return self.replace(**plain, clip=self.max_norm)
