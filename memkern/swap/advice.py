"""Measures how much each mode of the activations saves in a model."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..memory import saved_bytes
from ..saved import hooks
from .compress import compress, restore, swapped_state
from .measure import call_of, same_state

MODES: dict[str, dict[str, Any]] = {
    "1 bit": {"activations": 1},
    **{f"{bits} bits": {"activations": bits} for bits in (2, 3, 4)},
    "output": {"activations": "output"},
}


@dataclasses.dataclass(frozen=True)
class Advice:
    """Bytes that one forward pass saves in each mode; ``print`` shows them.

    modes: "as it is" (without any swap), "1 bit" to "4 bits" (``compress(model, activations=bits)``) and "output"
    (``compress(model, activations="output")``). modules: how many activations ``compress`` swaps.
    """

    modes: dict[str, int]
    modules: int

    @property
    def best(self) -> str:
        """The mode that saves least in bytes; of equals the more exact one, with "output" before the bits."""
        exact_first = ["as it is", "output", "4 bits", "3 bits", "2 bits", "1 bit"]
        return min(exact_first, key=lambda mode: self.modes[mode])

    def __str__(self) -> str:
        before = self.modes["as it is"]
        lines = [f"saved for the backward pass, {self.modules} activations"]
        for mode, saved in self.modes.items():
            share = saved / before if before else 1
            lines.append(f"  {mode:<9} {saved:>15,} bytes  {share:7.1%}")
        return "\n".join(lines)


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restores buffers, random numbers and swaps afterwards."""
    before, own = swapped_state(model), hooks.state_of(model)
    try:
        with same_state(model):
            yield
    finally:
        restore(model)
        for module, cls, attributes in before:
            module.__class__ = cls
            vars(module).update(attributes)
        hooks.bring_back(model, own)


def advise(model: nn.Module, example: Any) -> Advice:
    """Runs the model on ``example`` in every mode of its activations, and counts what is saved for the backward pass.

    model: as it is to be trained (training flag, dtype, device); it is left as it was, buffers and random numbers
        included. Modes that save an output pay off where the next layer saves the same tensor anyway; whether it does
        is what the count tells.
    example: one input tensor, a tuple of arguments, or a dict of keyword arguments.

    ``keep="input"``, the exact mode of :class:`memkern.nn.MLP`, is a module of its own and not among the swaps.
    """
    call, held = call_of(model, example)

    def saved() -> int:
        with torch.enable_grad():
            return saved_bytes(call, model, *held)

    with _unchanged(model):
        restore(model)
        modes, modules = {"as it is": saved()}, 0
        for mode, options in MODES.items():
            modules = len(compress(model, **options).swapped)
            modes[mode] = saved()
            restore(model)
    return Advice(modes, modules)
