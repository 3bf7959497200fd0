"""The options of training: the techniques that save memory, what each option may be, and one error. Imports no torch.

``memkern.plan``, ``memkern.apply``, ``memkern.make_optimizer`` and ``memkern.train`` take the same ``Techniques``;
memkern/techniques/flags.py makes the flags of ``python -m memkern plan`` and ``train`` from its fields.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

# The allowed values of options, by the options' names.
PRECISIONS = ("fp32", "bf16-mixed", "fp16-mixed", "bf16")
# The classes of memkern.optim; after "torch-" those of torch.optim.
CLASSES = {
    "adamw": "AdamW",
    "adam": "Adam",
    "lion": "Lion",
    "sgd": "SGD",
    "lamb": "LAMB",
    "lars": "LARS",
    "muon": "Muon",
}
OPTIMIZERS = (*CLASSES, "torch-adamw", "torch-adam", "torch-sgd")
STATE_BITS = (32, 8)
MASTER_WEIGHTS = (None, "bf16+16", "bf16+8")
ACTIVATION_BITS = (None, 1, 2, 3, 4)
SAVED_BITS = (None, "exact", 8)
CHECKPOINTING = (None, "blocks")
CHECKPOINT_BITS = (None, 8)
PARALLEL = ("ddp", "fsdp")
OFFLOAD = (None, "device", "cpu")
WEIGHTS_ON_HOST = (None, "layers")


WAYS_OF_SAVING: dict[str, dict[str, Any]] = {
    "as it is": {},
    "3-bit activations": {"activation_bits": 3},
    "checkpoint every other block": {"checkpointing": "blocks", "checkpoint_every": 2},
    "checkpoint every block": {"checkpointing": "blocks"},
    "checkpoints in 8 bits": {"checkpointing": "blocks", "checkpoint_bits": 8},
    "compiled blocks": {"compile": True},
    "compiled, saved once (exact)": {"compile": True, "saved_bits": "exact"},
    "compiled, saved in 8 bits": {"compile": True, "saved_bits": 8},
}
"""What a forward pass can save for the backward pass, by name: fields of Techniques. ``memkern.plan`` compares all."""


def spelled(value: Any) -> str:
    """A value as it is typed on the command line: none, 8, bf16+8."""
    if value is None:
        return "none"
    return str(value)


class OptionError(ValueError):
    """An option that cannot be used.

    name: the argument, or the field of Techniques or TrainConfig. message: what was given and what is allowed.
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(name, message)
        self.name = name
        self.message = message

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


def not_allowed(name: str, given: Any, allowed: str) -> OptionError:
    """The error that says which value was given, and in words which are allowed."""
    return OptionError(name, f"{given!r} given; allowed: {allowed}")


@contextlib.contextmanager
def refused(name: str, text: str) -> Iterator[None]:
    """Whatever is raised inside becomes an OptionError of one line: text, and the first line of the error."""
    try:
        yield
    except OptionError:
        raise
    except Exception as error:  # of libraries that raise all kinds
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise OptionError(name, f"{text}: {type(error).__name__}: {line}") from error


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that an option may be: a test, and what it tests in words."""

    accepts: Callable[..., bool]
    words: str


def at_least(low: int, high: int | None = None) -> Range:
    """The integers from ``low`` on, or to ``high``."""
    words = f"a whole number, {low} or more" if high is None else f"a whole number, {low} to {high}"
    return Range(lambda x: type(x) is int and low <= x and (high is None or x <= high), words)


def _finite(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


SHARE = Range(lambda x: _finite(x) and 0 < x <= 1, "a number above 0, at most 1")
RATE = Range(lambda x: _finite(x) and 0 <= x < 1, "a number, 0 or more, below 1")
NOT_NEGATIVE = Range(lambda x: _finite(x) and x >= 0, "a finite number, 0 or more")
POSITIVE = Range(lambda x: _finite(x) and x > 0, "a finite number above 0")


def option(
    default: Any,
    help: str,
    allowed: tuple[Any, ...] | Range | None = None,
    *,
    group: str = "",
    metavar: str | None = None,
    shown: str | None = None,
) -> Any:
    """A dataclass field that is also a flag of the command line.

    allowed: the choices, or the range of a number; a field whose default is None may be None too. shown: the default in
    words. group: the heading of ``--help``.
    """
    metadata = {"help": help, "allowed": allowed, "group": group, "metavar": metavar, "shown": shown}
    return dataclasses.field(default=default, metadata=metadata)


def check_fields(options: Any) -> None:
    """Raises OptionError for the first field whose value is not one of its choices or not in its range."""
    for field in dataclasses.fields(options):
        given, allowed = getattr(options, field.name), field.metadata.get("allowed")
        if isinstance(allowed, Range):
            if not (given is None and field.default is None) and not allowed.accepts(given):
                none = "None or " if field.default is None else ""
                raise not_allowed(field.name, given, none + allowed.words)
        elif allowed and not any(type(given) is type(value) and given == value for value in allowed):
            raise not_allowed(field.name, given, ", ".join(map(repr, allowed)))


@dataclasses.dataclass(frozen=True)
class Techniques:
    """The techniques that a training step uses to save memory. The defaults are plain fp32 training.

    precision: "fp32"; "bf16-mixed" and "fp16-mixed", autocast over fp32 weights (fp16 needs a GradScaler); "bf16",
        weights, activations and gradients in bf16.
    optimizer: memkern's "adamw", "adam", "lion", "sgd" (momentum 0.9), "lamb", "lars" or "muon" (at AdamW's learning
        rate, by ``adjust_lr_fn="match_rms_adamw"``; AdamW for all that is no matrix); torch's "torch-adamw",
        "torch-adam" or "torch-sgd". state_bits: 32 or 8; torch's have 32.
    master_weights: for bf16 weights alone, what is kept of their rounding errors: "bf16+16", 16 bits (2 bytes per
        parameter; a weight and its error have the bits of an fp32 number); "bf16+8", 8 bits (1 byte); None, nothing.
    activation_bits: 1 to 4 bits per element that activation functions save; None, torch's activations.
    linear_share: the share of the tokens from which linear layers compute their weights' gradients; None, all tokens
        (:class:`memkern.nn.RandomizedLinear`).
    checkpointing: "blocks" saves the input of every block alone, and the backward pass runs the block again. None,
        without. checkpoint_every: 2 does so with every other block, and so on. checkpoint_bits: 8 saves these inputs as
        8-bit codes, and the blocks read the values of the codes in the forward pass, too; None saves them exactly.
    step_in_backward: each parameter is updated when its gradient is there, which is then freed; with one micro-batch
        only, and without clipping by the norm of all gradients.
    loss_chunk: classes whose logits are in memory at a time (:class:`memkern.nn.LinearCrossEntropy`); None, all.
    offload: keeps the optimizer's states and errors on the host (:class:`memkern.optim.HostOffload`). "device" copies
        them to the device, which takes the step; it may be a step in the backward pass. "cpu" takes the step on the
        host; gradients go there, but stay on the device with torch's optimizers. The host has a copy of the weights,
        of bf16 ones in fp32 or, with ``master_weights``, in bf16 with their errors. None keeps all on the device.
    weights_on_host: "layers" keeps weights, gradients and states on the host. A block's weights are on the device while
        the block runs, forward and backward, and the optimizer steps on the host. None, all weights on the device.
    compile: every block is compiled by itself; ``saved_bits``, ``activation_bits`` and ``memory_budget`` are those of
        :func:`memkern.compile` then, for what the compiled blocks save. Without them it is torch.compile. Checkpoints
        are around compiled blocks. memory_budget: a share of what torch.compile saves; None, without.
    micro_batch: sequences in a forward pass. accumulation: forward passes in an optimizer step.

    Raises:
        OptionError: a value out of range, or two that exclude each other.
    """

    precision: str = option(
        "fp32",
        "weights and activations: fp32, fp32 weights under autocast (mixed), or all in bf16",
        PRECISIONS,
    )
    optimizer: str = option("adamw", "of memkern.optim, or of torch.optim (torch-)", OPTIMIZERS)
    state_bits: int = option(32, "bits per element of the optimizer's states", STATE_BITS)
    master_weights: str | None = option(
        None, "beside bf16 weights: their rounding errors in 16 bits (fp32's bits in all) or 8", MASTER_WEIGHTS
    )
    activation_bits: int | None = option(
        None, "bits per element that activations save for the backward pass", ACTIVATION_BITS
    )
    saved_bits: int | str | None = option(
        None, "with --compile, what the graphs save: once (exact), or in 8 bits", SAVED_BITS
    )
    linear_share: float | None = option(
        None, "share of the tokens that linear layers save for their weights' gradients, at most 1", SHARE
    )
    checkpointing: str | None = option(
        None,
        "save the inputs of blocks alone, and run the blocks again in the backward pass",
        CHECKPOINTING,
    )
    checkpoint_every: int = option(1, "with --checkpointing, 2 for every other block, and so on", at_least(1))
    checkpoint_bits: int | None = option(
        None, "bits per element of what --checkpointing saves; None, exactly", CHECKPOINT_BITS
    )
    step_in_backward: bool = option(
        False, "update each parameter as soon as it has its gradient, and free the gradient", (False, True)
    )
    loss_chunk: int | None = option(None, "classes whose logits are in memory at a time", at_least(1))
    offload: str | None = option(
        None, "keep the optimizer's states in host memory: the device steps them over the link, or the cpu", OFFLOAD
    )
    weights_on_host: str | None = option(
        None, "keep weights in host memory, on the device only while their block runs, and step there", WEIGHTS_ON_HOST
    )
    compile: bool = option(
        False, "compile every block; --saved-bits and --activation-bits are for what the graphs save", (False, True)
    )
    memory_budget: float | None = option(
        None, "with --compile, save at most this share, up to 1, of what torch.compile saves", SHARE
    )
    micro_batch: int = option(1, "sequences in a forward pass", at_least(1))
    accumulation: int = option(1, "forward passes in an optimizer step", at_least(1))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.checkpointing is None:
            for name, plain in (("checkpoint_bits", None), ("checkpoint_every", 1)):
                if (given := getattr(self, name)) != plain:
                    raise not_allowed(name, given, f"{plain} without checkpointing, which it is for")
        self._check_precision()
        self._check_optimizer()
        self._check_gradients()
        self._check_compiled()
        if self.weights_on_host is not None:
            self._check_streamed()

    def _check_precision(self) -> None:
        if self.master_weights is not None and self.precision != "bf16":
            raise not_allowed("master_weights", self.master_weights, "None, unless precision is 'bf16'")
        if self.precision == "fp16-mixed" and (self.step_in_backward or self.offload == "cpu"):
            name = "step_in_backward" if self.step_in_backward else "offload='cpu'"
            why = f"without {name}: a GradScaler looks at all gradients before the step"
            raise not_allowed("precision", self.precision, f"'fp32', 'bf16-mixed' and 'bf16', or {why}")

    def _check_optimizer(self) -> None:
        if self.is_torch and self.offload == "device":
            raise not_allowed(
                "offload", "device", f"None and 'cpu' with {self.optimizer}; memkern's step on the device"
            )
        if self.is_torch and self.state_bits != 32:
            raise not_allowed("state_bits", self.state_bits, f"32 with {self.optimizer}; memkern's have 8 too")
        if self.is_torch and self.master_weights is not None:
            allowed = f"None with {self.optimizer}; memkern's optimizers have them"
            raise not_allowed("master_weights", self.master_weights, allowed)

    def _check_gradients(self) -> None:
        if self.step_in_backward and self.accumulation > 1:
            allowed = f"False with accumulation={self.accumulation}, which needs all gradients"
            raise not_allowed("step_in_backward", True, allowed)
        if self.step_in_backward and self.offload == "cpu":
            raise not_allowed("step_in_backward", True, "False with offload='cpu', which frees the gradients already")

    def _check_compiled(self) -> None:
        if self.memory_budget is not None and not self.compile:
            raise not_allowed("memory_budget", self.memory_budget, "None without compile, whose graphs it is for")
        if self.saved_bits is not None and not self.compile:
            allowed = "None without compile, whose graphs it is for; in eager mode checkpointing saves less"
            raise not_allowed("saved_bits", self.saved_bits, allowed)

    def _check_streamed(self) -> None:
        streamed = f"with weights_on_host={self.weights_on_host!r}"
        if self.offload:
            raise not_allowed("offload", self.offload, f"None {streamed}: states and steps are on the host already")
        if self.autocast is not None:
            why = "autocast would keep copies of all weights on the device for the backward pass"
            raise not_allowed("precision", self.precision, f"'fp32' and 'bf16' {streamed}: {why}")

    @property
    def autocast(self) -> str | None:
        """ "bf16" or "fp16" under autocast, else None."""
        return self.precision.removesuffix("-mixed") if self.precision.endswith("-mixed") else None

    @property
    def is_torch(self) -> bool:
        """Whether the optimizer is torch.optim's."""
        return self.optimizer.startswith("torch-")

    @property
    def algorithm(self) -> str:
        """The optimizer, whether memkern's or torch's."""
        return self.optimizer.removeprefix("torch-")

    @property
    def optimizer_class(self) -> str:
        """The name of the optimizer's class in memkern.optim, or in torch.optim."""
        return CLASSES[self.algorithm]

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """The optimizer's options beside lr and those of its states."""
        own: dict[str, dict[str, Any]] = {
            "sgd": {"momentum": 0.9},
            "muon": {"adjust_lr_fn": "match_rms_adamw"},
        }
        return own.get(self.algorithm, {})

    @property
    def host_copies(self) -> bool:
        """Whether offload holds bf16 weights with the bits of fp32 on the host."""
        return self.offload == "cpu" and self.precision == "bf16" and self.master_weights is None

    def replace(self, **changes: Any) -> Self:
        """A copy with other values."""
        return dataclasses.replace(self, **changes)

    @property
    def label(self) -> str:
        """The optimizer in a table: "adamw 8-bit", and "adamw" with 32-bit states."""
        if self.state_bits == 32:
            return self.optimizer
        return f"{self.optimizer} {spelled(self.state_bits)}-bit"

    def __str__(self) -> str:
        words = ", ".join(self._words())
        times = f" x {self.accumulation}" if self.accumulation > 1 else ""
        return f"{words}, micro-batch {self.micro_batch}{times}"

    def _words(self) -> Iterator[str]:
        precision = {"fp32": "fp32", "bf16": "bf16 weights"}
        weights = {"bf16+16": "16-bit errors", "bf16+8": "8-bit errors"}
        errors = f" with {weights[self.master_weights]}" if self.master_weights else ""
        yield precision.get(self.precision, f"{self.autocast} autocast") + errors
        if self.compile:
            budget = "" if self.memory_budget is None else f" with a budget of {self.memory_budget:g}"
            yield f"compiled blocks{budget}"
        yield f"{self.optimizer}, {self.state_bits}-bit states"
        if self.activation_bits:
            yield f"{self.activation_bits}-bit activations"
        if self.saved_bits:
            yield "saved tensors in 8 bits" if self.saved_bits == 8 else "saved tensors once (exact)"
        if self.linear_share is not None:
            yield f"linear gradients from {100 * self.linear_share:g} % of the tokens"
        if self.checkpointing:
            codes = " in 8 bits" if self.checkpoint_bits else ""
            which = "every block" if self.checkpoint_every == 1 else f"one of {self.checkpoint_every} blocks"
            yield f"checkpoint {which}{codes}"
        if self.step_in_backward:
            yield "step in backward"
        if self.loss_chunk:
            yield f"loss in chunks of {self.loss_chunk} classes"
        if self.offload:
            yield "states on the host" if self.offload == "device" else "optimizer on the host"
        if self.weights_on_host:
            yield "weights and optimizer on the host"
