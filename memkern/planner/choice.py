"""Chooses techniques: the fastest set that fits, and the largest micro-batch with it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

from ..techniques.options import STATE_BITS, WAYS_OF_SAVING, OptionError, Techniques, not_allowed
from .prediction import Prediction, Predictor

# Candidates for the precision, the simplest first.
PRECISIONS: tuple[dict[str, Any], ...] = (
    {"precision": "fp32"},
    {"precision": "bf16-mixed"},
    {"precision": "bf16", "master_weights": "bf16+16"},
    {"precision": "bf16", "master_weights": "bf16+8"},
)
PLACES: tuple[dict[str, Any], ...] = (
    {}, {"offload": "device"}, {"offload": "cpu"}, {"weights_on_host": "layers"},
)  # fmt: skip
"""Candidates for where the optimizer's states are, and with the last one the weights."""
# The fields of all ways to save less for the backward pass, each at its default.
NO_SAVING = {name: getattr(Techniques(), name) for way in WAYS_OF_SAVING.values() for name in way}
LOSS_CHUNK = 4096  # classes
MAX_MICRO_BATCH = 4096


@dataclasses.dataclass
class Chooser:
    """Chooses techniques for optimizer steps of ``batch_size`` sequences.

    given: fields of Techniques that stay as they are. clip: the norm that gradients are clipped to, 0 for none.
    host_memory: bytes that may be used on the host, None for any number.
    """

    predictor: Predictor
    given: Mapping[str, Any]
    batch_size: int
    clip: float
    host_memory: int | None = None

    @functools.cached_property
    def saving(self) -> list[dict[str, Any]]:
        """Candidates for what is saved for the backward pass. The last needs the least memory on the device.

        Checkpoints come with 3-bit activations, or around compiled blocks with ``saved_bits="exact"``. Blocks are
        compiled where ``compile`` is given. A model without a list of like blocks has no checkpoints.
        """
        compiled = bool(self.given.get("compile"))
        checkpoints = [way for way in WAYS_OF_SAVING.values() if "checkpointing" in way and self.predictor.has_blocks]
        without = [way for way in WAYS_OF_SAVING.values() if "checkpointing" not in way]
        extra = {"saved_bits": "exact"} if compiled else {"activation_bits": 3}
        return [
            *(way for way in without if way.get("compile", False) == compiled),
            *(extra | way for way in checkpoints),
        ]

    @functools.cached_property
    def places(self) -> tuple[dict[str, Any], ...]:
        """``PLACES`` for this device and this model."""
        if self.predictor.device == "cpu":
            return PLACES[:1]
        return PLACES if self.predictor.has_blocks else PLACES[:3]

    def frugal(self, techniques: Techniques) -> Techniques:
        """The same techniques with the activations, and the chunked loss, that need the least memory."""
        chunk = LOSS_CHUNK if self.predictor.takes_chunks else None
        for saving in reversed(self.saving):  # skips what excludes a given technique
            with contextlib.suppress(OptionError):
                smallest = techniques.replace(**({**NO_SAVING, **saving, "loss_chunk": chunk, **self.given}))
                self.predictor.check(smallest)
                if self.predictor.runs(smallest):
                    return smallest
        return techniques

    def _host_fits(self, techniques: Techniques) -> bool:
        """Whether what is on the host in place of the device fits there."""
        return self.host_memory is None or self.predictor.predict(techniques).host <= self.host_memory

    @functools.cached_property
    def candidates(self) -> list[Techniques]:
        """All sets that may be recommended. Randomized linear layers are in them only if they are given."""
        chunks = (None, LOSS_CHUNK) if self.predictor.takes_chunks else (None,)
        whole_batch = {"micro_batch": self.batch_size, "accumulation": 1}
        shapes = [whole_batch, {"micro_batch": 1, "accumulation": self.batch_size}]
        if not self.clip:
            shapes.append({**whole_batch, "step_in_backward": True})
        sets: dict[Techniques, None] = {}  # in order, each once
        for precision, bits, saving, chunk, place, shape in itertools.product(
            PRECISIONS, STATE_BITS, self.saving, chunks, self.places, shapes
        ):
            choices = {**precision, **saving, **shape, **place, "state_bits": bits, "loss_chunk": chunk, **self.given}
            try:
                techniques = Techniques(**choices)
                self.predictor.check(techniques)
                if self.clip and techniques.step_in_backward:
                    allowed = f"False with clip={self.clip:g}, which needs all gradients"
                    raise not_allowed("step_in_backward", True, allowed)
                sets[techniques] = None
            except OptionError as error:  # techniques that exclude each other
                refused = error
        if not sets:
            raise refused
        return list(sets)

    def smallest(self) -> Prediction:
        """The smallest prediction, with all techniques but randomized linear layers.

        For each way to hold gradients, states and weights, the one with the smallest floor is predicted.
        """
        by_shape: dict[Any, Techniques] = {}

        def size(techniques: Techniques) -> tuple[int, int]:
            on_host = techniques.offload or techniques.weights_on_host
            return self.predictor.floor(techniques), self.predictor.held_on_host(techniques) if on_host else 0

        for techniques in sorted(self.candidates, key=size):
            on_host = (techniques.offload, techniques.weights_on_host)
            shape = (techniques.micro_batch, techniques.step_in_backward, on_host)
            by_shape.setdefault(shape, techniques)
        frugal = [self.frugal(techniques) for techniques in by_shape.values()]
        running = [*filter(self.predictor.runs, frugal)] or frugal[:1]  # predicting that raises why it does not run
        fitting = [*filter(self._host_fits, running)] or running
        return min(map(self.predictor.predict, fitting), key=lambda p: p.peak)

    def fastest(self, memory: int) -> Prediction | None:
        """The fastest set that fits; of sets within 2 % of its time, the one with the fewest techniques."""
        predictor = self.predictor

        def rank(techniques: Techniques) -> tuple[int, int]:
            fields = zip(dataclasses.astuple(techniques), dataclasses.astuple(Techniques()), strict=True)
            changes = sum(value != plain for value, plain in fields)
            return round(math.log(predictor.seconds(techniques)) / 0.02), changes

        possible = [techniques for techniques in self.candidates if predictor.floor(techniques) <= memory]
        for techniques in sorted(possible, key=rank):
            if (
                predictor.predict(self.frugal(techniques)).peak <= memory
                and predictor.runs(techniques)
                and predictor.predict(techniques).peak <= memory
                and self._host_fits(techniques)
            ):
                return predictor.predict(techniques)
        return None

    def largest_micro_batch(self, techniques: Techniques, memory: int) -> int:
        """The largest number of sequences in a forward pass that fits; ``techniques`` must fit as they are."""

        def peak(size: int) -> int:
            prediction = self.predictor.predict(techniques.replace(micro_batch=size))
            if self.host_memory is None:
                return prediction.peak
            # The host's used share in bytes of the device's memory, so that one limit serves both.
            return max(prediction.peak, int(memory * prediction.host / self.host_memory))

        fits, fails, tried = techniques.micro_batch, MAX_MICRO_BATCH + 1, 2 * techniques.micro_batch
        while fails - fits > 1:
            tried = min(max(tried, fits + 1), fails - 1)
            slope = (peak(tried) - peak(fits)) / (tried - fits)
            if peak(tried) <= memory:
                fits = tried
            else:
                fails = tried
            tried = fits + int((memory - peak(fits)) / max(slope, 1.0))
        return fits
