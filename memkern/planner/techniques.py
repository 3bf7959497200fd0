"""The techniques that make a training step smaller: one frozen dataclass, which plans and runs have in common.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

PRECISIONS = ("fp32", "amp", "bf16")
# The classes of memkern.optim, and of torch.optim after "torch-".
CLASSES = {"adamw": "AdamW", "adam": "Adam", "lion": "Lion", "sgd": "SGD", "lamb": "LAMB", "lars": "LARS"}
OPTIMIZERS = (*CLASSES, "torch-adamw", "torch-adam", "torch-sgd")
CHECKPOINTING = ("none", "blocks", "sqrt")
MASTER_WEIGHTS = (None, "fp32", "bf16+16", "bf16+8")
SAVED_BITS = (None, "exact", 8)
CHOICES: dict[str, tuple[Any, ...]] = {
    "precision": PRECISIONS,
    "optimizer": OPTIMIZERS,
    "state_bits": (8, 32, (8, 4)),
    "activation_bits": (None, 1, 2, 3, 4),
    "saved_bits": SAVED_BITS,
    "checkpointing": CHECKPOINTING,
    "master_weights": MASTER_WEIGHTS,
    "step_in_backward": (False, True),
    "offload": (False, True),
}
RANGES = {
    "randomized_linear": "False, True or a share above 0, at most 1",
    "loss_chunk": "None or a whole number, 1 or more",
    "micro_batch": "a whole number, 1 or more",
    "accumulation": "a whole number, 1 or more",
}
"""What the others may be, in words."""


class TechniqueError(ValueError):
    """A technique that cannot be had: which field, what was given and what is allowed."""

    def __init__(self, name: str, given: Any, allowed: str) -> None:
        super().__init__(f"{name}: {given!r} given; allowed: {allowed}")
        self.name = name
        self.message = f"{given!r} given; allowed: {allowed}"


@dataclasses.dataclass(frozen=True)
class Techniques:
    """What a training step does to need less memory. The defaults are plain fp32 training.

    precision: "fp32"; "amp", autocast to bf16 over fp32 weights; "bf16", weights, activations and gradients in bf16.
    optimizer: memkern's "adamw", "adam", "lion", "sgd" (momentum 0.9), "lamb" or "lars"; torch's "torch-adamw",
        "torch-adam" or "torch-sgd". state_bits: 32, 8 or, of Adam and AdamW, (8, 4); torch's have 32.
    activation_bits: 1 to 4 bits per element that activation functions save; None, torch's activations.
    saved_bits: :class:`memkern.quantize_saved` around the forward pass, with 8 bits or "exact"; None, without it.
    randomized_linear: the share of the tokens from which linear layers compute their weights' gradients, above 0 and
        at most 1; True is 0.2; False, all tokens.
    checkpointing: "blocks" saves the input of every block, "sqrt" that of every sqrt(L)-th of L blocks; what is
        between is recomputed in the backward pass.
    master_weights: with bf16 weights; a copy in fp32 (4 bytes per parameter), the rounding error of the weight in 16
        bits (2) or in 8 (1), or None (0).
    step_in_backward: each parameter is updated when its gradient is there, which is then freed; with one micro-batch
        only, and without clipping by the norm of all gradients.
    loss_chunk: classes whose logits are in memory at a time (:class:`memkern.nn.LinearCrossEntropy`); None, all.
    offload: the optimizer's states, errors and gradients are on the host, where the step is computed
        (:class:`memkern.optim.HostOffload`, ``offload_gradients=True``); bf16 weights are there in fp32, or with
        ``master_weights`` in 16 or 8 bits as these.
    micro_batch: sequences in a forward pass. accumulation: forward passes in an optimizer step.

    Raises:
        TechniqueError: a value out of range, or two that exclude each other.
    """

    precision: str = "fp32"
    optimizer: str = "adamw"
    state_bits: int | tuple[int, int] = 32
    activation_bits: int | None = None
    saved_bits: int | str | None = None
    randomized_linear: bool | float = False
    checkpointing: str = "none"
    master_weights: str | None = None
    step_in_backward: bool = False
    loss_chunk: int | None = None
    offload: bool = False
    micro_batch: int = 1
    accumulation: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.state_bits, list):  # as JSON has it
            object.__setattr__(self, "state_bits", tuple(self.state_bits))
        for name, allowed in CHOICES.items():
            given = getattr(self, name)
            if not any(
                given is value or (type(given) is type(value) and given == value) for value in allowed
            ):
                raise TechniqueError(name, given, ", ".join(map(repr, allowed)))
        for name in ("loss_chunk", "micro_batch", "accumulation"):
            given = getattr(self, name)
            if not (_is_count(given) or (given is None and name == "loss_chunk")):
                raise TechniqueError(name, given, RANGES[name])
        if not isinstance(self.randomized_linear, (bool, float, int)) or not 0 <= self.randomized_linear <= 1:
            raise TechniqueError("randomized_linear", self.randomized_linear, RANGES["randomized_linear"])
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.master_weights is not None and self.precision != "bf16":
            raise TechniqueError("master_weights", self.master_weights, "None, unless precision is 'bf16'")
        if self.state_bits != 32 and self.is_torch:
            raise TechniqueError(
                "state_bits", self.state_bits, f"32 with {self.optimizer}; memkern.optim's have 8 too"
            )
        if self.state_bits == (8, 4) and self.optimizer not in ("adamw", "adam"):
            raise TechniqueError("state_bits", (8, 4), f"8 or 32 with {self.optimizer}")
        if self.step_in_backward and self.accumulation > 1:
            raise TechniqueError(
                "step_in_backward",
                True,
                f"False with accumulation={self.accumulation}, which needs all gradients",
            )
        if self.step_in_backward and self.offload:
            raise TechniqueError(
                "step_in_backward", True, "False with offload, which frees the gradients already"
            )

    @property
    def is_torch(self) -> bool:
        """Whether the optimizer is torch.optim's."""
        return self.optimizer.startswith("torch-")

    @property
    def optimizer_class(self) -> str:
        """The name of the optimizer's class in memkern.optim, or in torch.optim."""
        return CLASSES[self.optimizer.removeprefix("torch-")]

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """What the optimizer is given beside lr and how its states are stored."""
        return {"momentum": 0.9} if self.optimizer_class == "SGD" else {}

    @property
    def host_copies(self) -> bool:
        """Whether offload holds bf16 weights in fp32 on the host."""
        return self.offload and self.precision == "bf16" and self.master_weights in (None, "fp32")

    @property
    def linear_share(self) -> float | None:
        """``randomized_linear`` as the share of the tokens; None where linear layers are torch's."""
        if self.randomized_linear is False or self.randomized_linear == 0:
            return None
        return 0.2 if self.randomized_linear is True else float(self.randomized_linear)

    def replace(self, **changes: Any) -> Techniques:
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        return (
            ", ".join(self._words())
            + f", micro-batch {self.micro_batch}"
            + (f" x {self.accumulation}" if self.accumulation > 1 else "")
        )

    def _words(self) -> Iterator[str]:
        weights = {
            None: "",
            "fp32": " with an fp32 copy",
            "bf16+16": " with 16-bit errors",
            "bf16+8": " with 8-bit errors",
        }
        names = {"fp32": "fp32", "amp": "bf16 autocast", "bf16": "bf16 weights"}
        yield names[self.precision] + weights[self.master_weights]
        bits = "8- and 4-bit" if self.state_bits == (8, 4) else f"{self.state_bits}-bit"
        yield f"{'torch.' * self.is_torch}{self.optimizer_class}, {bits} states"
        if self.activation_bits:
            yield f"{self.activation_bits}-bit activations"
        if self.saved_bits:
            yield "saved tensors in 8 bits" if self.saved_bits == 8 else "saved tensors once (exact)"
        if (share := self.linear_share) is not None:
            yield f"linear gradients from {100 * share:g} % of the tokens"
        if self.checkpointing != "none":
            yield (
                "checkpoint every block"
                if self.checkpointing == "blocks"
                else "checkpoint every sqrt(L) blocks"
            )
        if self.step_in_backward:
            yield "step in backward"
        if self.loss_chunk:
            yield f"loss in chunks of {self.loss_chunk} classes"
        if self.offload:
            yield "optimizer on the host"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
