"""Which techniques to use: the fastest set that fits, and the largest micro-batch with it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

from ..options import OptionError, Techniques, not_allowed
from .prediction import Prediction, Predictor

PRECISIONS: tuple[dict[str, Any], ...] = (
    {"precision": "fp32"},
    {"precision": "bf16-mixed"},
    {"precision": "bf16", "master_weights": "fp32"},
    {"precision": "bf16", "master_weights": "bf16+16"},
    {"precision": "bf16", "master_weights": "bf16+8"},
)
SAVING: tuple[dict[str, Any], ...] = (
    {},
    {"activation_bits": 3},
    {"activation_bits": 3, "saved_bits": "exact"},
    {"activation_bits": 3, "saved_bits": 8},
    {"activation_bits": 3, "checkpointing": "blocks"},
    {"activation_bits": 3, "saved_bits": 8, "checkpointing": "blocks"},
)
"""Candidates for what is saved for the backward pass, from the most memory to the least."""
LOSS_CHUNK = 4096  # classes
MAX_MICRO_BATCH = 4096


class Chooser:
    """The choice for optimizer steps of ``batch_size`` sequences. given: fields of Techniques that stay as they are."""

    def __init__(self, predictor: Predictor, given: Mapping[str, Any], batch_size: int, clip: float) -> None:
        self.predictor, self.given, self.batch_size, self.clip = predictor, dict(given), batch_size, clip

    @functools.cached_property
    def saving(self) -> tuple[dict[str, Any], ...]:
        """``SAVING``, without checkpoints for a model that has no list of like blocks."""
        import torch

        from ..applying import block_lists
        from .models import Given

        source = self.predictor.source
        if isinstance(source, Given):
            model = source.model
        else:
            with torch.device("meta"):
                model = source.build(torch.float32)
        has_blocks = any(True for _ in block_lists(model))
        return SAVING if has_blocks else tuple(each for each in SAVING if "checkpointing" not in each)

    def frugal(self, techniques: Techniques) -> Techniques:
        """The same optimizer and weights, with the least activations."""
        chunk = LOSS_CHUNK if self.predictor.source.is_language_model else None
        return techniques.replace(**({**self.saving[-1], "loss_chunk": chunk} | self.given))

    @functools.cached_property
    def candidates(self) -> list[Techniques]:
        """All sets that may be recommended. Randomized linear layers are in them only if they are given."""
        chunks = (None, LOSS_CHUNK) if self.predictor.source.is_language_model else (None,)
        offloads = (False,) if self.predictor.device == "cpu" else (False, True)
        whole = {"micro_batch": self.batch_size, "accumulation": 1}
        shapes = [whole, {"micro_batch": 1, "accumulation": self.batch_size}]
        if not self.clip:
            shapes.append({**whole, "step_in_backward": True})
        found: dict[Techniques, None] = {}  # in order, each once
        for precision, bits, saving, chunk, offload, shape in itertools.product(
            PRECISIONS, (32, 8), self.saving, chunks, offloads, shapes
        ):
            choices = {
                **precision,
                **saving,
                **shape,
                "state_bits": bits,
                "loss_chunk": chunk,
                "offload": offload,
            }
            with contextlib.suppress(OptionError):  # techniques that exclude each other
                techniques = Techniques(**(choices | self.given))
                if not (self.clip and techniques.step_in_backward):
                    found[techniques] = None
        if not found:  # step_in_backward and clip are both given
            raise not_allowed(
                "step_in_backward", True, f"False with clip={self.clip:g}, which needs all gradients"
            )
        return list(found)

    def smallest(self) -> Prediction:
        """All techniques but randomized linear layers, with the way of holding gradients that needs least."""
        least: dict[Any, Techniques] = {}
        for techniques in sorted(self.candidates, key=self.predictor.floor):
            shape = (techniques.micro_batch, techniques.step_in_backward, techniques.offload)
            least.setdefault(shape, techniques)
        return min(map(self.predictor.predict, map(self.frugal, least.values())), key=lambda p: p.peak)

    def fastest(self, memory: int) -> Prediction | None:
        """The fastest set that fits; of sets within 2 % of its time, the one with the fewest techniques."""
        predict = self.predictor.predict
        found = [t for t in self.candidates if self.predictor.floor(t) <= memory]
        found.sort(key=lambda t: (round(math.log(self.predictor.seconds(t)) / 0.02), _changes(t)))
        for techniques in found:
            if (
                predict(self.frugal(techniques)).peak <= memory
                and (prediction := predict(techniques)).peak <= memory
            ):
                return prediction
        return None

    def largest_micro_batch(self, techniques: Techniques, memory: int) -> int:
        """The largest number of sequences in a forward pass that fits; ``techniques`` must fit as they are."""

        def peak(size: int) -> int:
            return self.predictor.predict(techniques.replace(micro_batch=size)).peak

        fits, fails, tried = techniques.micro_batch, MAX_MICRO_BATCH + 1, 2 * techniques.micro_batch
        while fails - fits > 1:
            tried = min(max(tried, fits + 1), fails - 1)
            peaks = {size: peak(size) for size in (fits, tried)}
            if peaks[tried] <= memory:
                slope = (peaks[tried] - peaks[fits]) / (tried - fits)
                fits = tried
            else:
                slope = (peaks[tried] - peaks[fits]) / (tried - fits)
                fails = tried
            tried = fits + int((memory - peak(fits)) / max(slope, 1.0))
        return fits


def _changes(techniques: Techniques) -> int:
    """How many fields differ from plain training."""
    pairs = zip(dataclasses.astuple(techniques), dataclasses.astuple(Techniques()), strict=True)
    return sum(value != plain for value, plain in pairs)
