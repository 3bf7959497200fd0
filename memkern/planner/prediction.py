"""Predicts a training step with given techniques: bytes by category and phase, and seconds."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from ..techniques.options import OptionError, Techniques, not_allowed, spelled
from .hardware import COMPILED, Hardware, seconds

CATEGORIES = (
    "parameters", "errors", "gradients", "optimizer", "saved activations", "temporaries", "process and context",
)  # fmt: skip
PHASES = ("begin", "forward", "backward", "step")
UNIT = {"cpu": 64, "cuda": 512}  # bytes, of which torch's allocator makes sizes a multiple
UNRELEASED = {"cpu": 0, "cuda": 1}
"""``ShardedWeights.unreleased``: with gloo a collective has ended before the next operator, with NCCL it may run."""
ALLOCATED_BY_A_STEP = ("gradients", "saved activations", "temporaries")  # categories that get a margin
WITHOUT_EFFECT_ON_TRACES = (  # fields of Techniques
    "optimizer", "state_bits", "master_weights", "step_in_backward", "offload", "weights_on_host", "accumulation",
)  # fmt: skip
UNUSED_OF_SLABS = 0.03
"""The share of the host's pinned memory that stays unused at the end of its slabs (offload/pinned.py): the most that it
is for models from GPT-2 to Llama-3.1-70B."""
ON_CPU_TENSORS = "cuda, on fake CPU tensors"
MARGIN = {"cpu": 0.02, "cuda": 0.03, ON_CPU_TENSORS: 0.15}
"""Added to what a step allocates, as a share of it: for scratch memory inside operators, and for fragmentation."""
BAND = {"cpu": (0.01, 0.05), "cuda": (0.01, 0.07), ON_CPU_TENSORS: (0.05, 0.25)}
"""Shares of a prediction: by how much the real peak may be above it, and below it."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The memory and the time of a step with given techniques.

    categories: bytes at the peak, by ``CATEGORIES``. phases: the peak of each of ``PHASES``, process included.
    host: bytes on the host with offload or weights_on_host: weights, states, gradients, and buffers for the transfers.
    seconds: of an optimizer step, by the model of memkern/planner/hardware.py. brought: bytes of weights that each pass
    brings with weights_on_host.
    """

    techniques: Techniques
    categories: dict[str, int]
    phases: dict[str, int]
    host: int
    seconds: float
    brought: int = 0

    @property
    def peak(self) -> int:
        return sum(self.categories.values())


class NotTraced(OptionError):
    """A step of the model with these techniques does not run on fake tensors."""


def _trace_error(techniques: Techniques, error: Exception) -> NotTraced:
    """The error for a step that raises on fake tensors. It names what differs from plain training."""
    reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
    plain = Techniques(micro_batch=techniques.micro_batch)
    names = [field.name for field in dataclasses.fields(Techniques)]
    differ = [name for name in names if getattr(techniques, name) != getattr(plain, name)]
    if differ:
        given = ", ".join(f"{name}={spelled(getattr(techniques, name))}" for name in differ)
        return NotTraced("techniques", f"{given}: the model's step raises {reason}")
    return NotTraced(
        "model",
        f"a plain training step raises on fake tensors ({reason}); allowed: a model that can be built, and "
        "whose step does not depend on values: as a configuration, or as a module with a batch (inputs=) and, where it "
        "returns none, a loss (loss=)",
    )


class Predictor:
    """Predictions for one model on one device. Techniques for which traces and sizes are the same share them.

    source: of memkern.planner.models. counted_on: the fake tensors, a key of ``BAND``. devices: how many share it.
    """

    def __init__(self, source: Any, device: str, counted_on: str, hardware: Hardware, devices: int = 1) -> None:
        from . import fake_step

        self.source, self.device, self.counted_on, self.hardware = source, device, counted_on, hardware
        self.devices = devices
        fake_device = "cuda" if counted_on == "cuda" else "cpu"

        def cached(run: Callable[..., Any]) -> Callable[[Techniques], Any]:
            """Caches what a function returns, or the error that it raises, which functools.cache would not."""

            @functools.cache
            def run_once(techniques: Techniques) -> Any:
                try:
                    return run(source, techniques, fake_device)
                except OptionError as error:
                    return error
                except Exception as error:  # a model's own code may raise anything
                    return _trace_error(techniques, error)

            def checked(techniques: Techniques) -> Any:
                if isinstance(outcome := run_once(techniques), OptionError):
                    raise outcome.with_traceback(None)  # a traceback would grow each time
                return outcome

            return checked

        self._traces = cached(fake_step.traces)
        self._static_bytes = cached(lambda *args: fake_step.static_bytes(*args, devices, device == "cuda"))
        self._known_peaks: dict[Any, Any] = {}
        self.predict = functools.cache(self._predict)

    def traces(self, techniques: Techniques) -> Any:
        """Traces of a step. Raises NotTraced where the model's own code raises."""
        plain = Techniques()
        return self._traces(techniques.replace(**{name: getattr(plain, name) for name in WITHOUT_EFFECT_ON_TRACES}))

    def runs(self, techniques: Techniques) -> bool:
        """Whether a step with these techniques can be traced."""
        with contextlib.suppress(NotTraced):
            self.traces(techniques)
            return True
        return False

    @functools.cached_property
    def least_batch(self) -> int:
        """Sequences of the smallest step that runs: 1, or 2 where batch normalization needs them."""
        needs_two = not self.runs(Techniques()) and self.runs(Techniques(micro_batch=2))
        return 2 if needs_two else 1

    def static_bytes(self, techniques: Techniques) -> Any:
        """The StaticBytes with these techniques, of which few have an effect on them."""
        precision = "bf16" if techniques.precision == "bf16" else "fp32"
        relevant = {name: getattr(techniques, name) for name in ("optimizer", "state_bits", "master_weights")}
        return self._static_bytes(Techniques(precision=precision, **relevant))

    def floor(self, techniques: Techniques) -> int:
        """A lower bound of the peak, found without a trace."""
        sizes = self.static_bytes(techniques)
        if self._has_weights_on_host(techniques):
            return self.hardware.process + sizes.buffers + sizes.largest_gradient
        frees_gradients = techniques.step_in_backward or techniques.offload == "cpu"
        gradients = sizes.largest_gradient if frees_gradients else sizes.gradients
        states = 0 if techniques.offload else sizes.errors + sizes.optimizer
        return self.hardware.process + sizes.parameters + states + gradients

    @functools.cached_property
    def has_blocks(self) -> bool:
        """Whether the model has a list of like blocks."""
        return self.static_bytes(Techniques()).block > 0

    @functools.cached_property
    def takes_chunks(self) -> bool:
        """Whether the loss in chunks is the model's loss."""
        from .fake_step import has_linear_head

        return self.source.is_language_model and has_linear_head(self.source)

    def _has_weights_on_host(self, techniques: Techniques) -> bool:
        """Whether the weights are on the host and the device is another."""
        return bool(techniques.weights_on_host) and self.device != "cpu"

    def _predict(self, techniques: Techniques) -> Prediction:
        self.check(techniques)
        traces, more_blocks = self.traces(techniques)
        rows = self._by_phase(techniques, traces, more_blocks)
        sums = {phase: sum(rows[phase].values()) for phase in PHASES}
        largest = rows[max(sums, key=sums.__getitem__)]
        return Prediction(
            techniques,
            categories={name: largest.get(name, 0) for name in CATEGORIES},
            phases=sums,
            host=self.held_on_host(techniques) if self._has_states_on_host(techniques) else 0,
            seconds=self.seconds(techniques),
            brought=self._brought(techniques),
        )

    def _brought(self, techniques: Techniques) -> int:
        """Bytes of weights that each pass brings from the host."""
        sizes = self.static_bytes(techniques)
        return sizes.parameters - sizes.buffers if self._has_weights_on_host(techniques) else 0

    def _has_states_on_host(self, techniques: Techniques) -> bool:
        """Whether the optimizer's states are on the host and the device is another."""
        return (techniques.offload is not None and self.device != "cpu") or self._has_weights_on_host(techniques)

    def _steps_on_host(self, techniques: Techniques) -> bool:
        """Whether the host's processors step, so that gradients leave the device."""
        return self._has_states_on_host(techniques) and techniques.offload != "device"

    def _bucket_bytes(self, techniques: Techniques) -> int:
        """Bytes of the two buckets through which offload="device" copies states to the device and back.

        A bucket holds pieces of parameters, or whole ones where the optimizer needs their norms or matrices.
        """
        from ..optim.offload.device import BUCKET_BYTES, LARGE_BYTES

        if self._steps_on_host(techniques):
            return 0
        sizes = self.static_bytes(techniques)
        states, largest = sizes.errors + sizes.optimizer, BUCKET_BYTES
        if techniques.algorithm in ("lamb", "lars", "muon"):
            largest = max(largest, math.ceil(states * sizes.largest_gradient / max(1, sizes.gradients)))
        return min(states, largest + min(largest, LARGE_BYTES))

    def _by_phase(self, techniques: Techniques, traces: Sequence[Any], more_blocks: int) -> dict[str, dict[str, int]]:
        """Bytes at the peak of each of ``PHASES``, by category."""
        sizes, on_host = self.static_bytes(techniques), self._has_states_on_host(techniques)
        steps_on_host = self._steps_on_host(techniques)
        frees_gradients = techniques.step_in_backward or steps_on_host
        accumulates = techniques.accumulation > 1 and not frees_gradients
        copies = (4 if techniques.is_torch else 2) * sizes.count if techniques.host_copies else 0
        static = {
            "parameters": sizes.buffers if self._has_weights_on_host(techniques) else sizes.parameters,
            "errors": 0 if on_host else sizes.errors + copies,
            "gradients": sizes.gradients if accumulates else 0,
            "optimizer": self._bucket_bytes(techniques) if on_host else sizes.optimizer,
            "process and context": self.hardware.process,
        }
        peaks = self._peaks(techniques, traces, more_blocks, free_gradients=frees_gradients or accumulates)
        step_temporaries = sizes.step_temporaries if techniques.step_in_backward and not steps_on_host else 0
        rows = {
            phase: static
            | {
                "gradients": static["gradients"] + peak["gradients"],
                "saved activations": peak["saved"],
                "temporaries": peak["temporaries"] + (step_temporaries if phase == "backward" else 0),
            }
            for phase, peak in peaks.items()
        }
        rows["begin"] = static
        rows["step"] = static | {
            "gradients": 0 if frees_gradients else sizes.gradients,
            "temporaries": 0 if steps_on_host else sizes.step_temporaries,
        }
        for row in rows.values():
            allocated = sum(row.get(name, 0) for name in ALLOCATED_BY_A_STEP)
            row["temporaries"] = row.get("temporaries", 0) + int(MARGIN[self.counted_on] * allocated) + traces[0].batch
        return rows

    def check(self, techniques: Techniques) -> None:
        """Raises OptionError for what is not counted with weights on the host, without a trace."""
        if techniques.loss_chunk and not self.takes_chunks:
            allowed = "None for a model that is no causal language model, or whose logits are no linear layer's"
            raise not_allowed("loss_chunk", techniques.loss_chunk, allowed)
        given = techniques.weights_on_host
        if given and not self.has_blocks:
            raise not_allowed("weights_on_host", given, "None for a model without a list of like blocks")
        if given and techniques.compile:
            raise not_allowed("weights_on_host", given, "None with compile, in a plan: what both need is not counted")

    def held_on_host(self, techniques: Techniques) -> int:
        """Bytes on the host with offload or weights_on_host, found without a trace: weights, errors, states, gradients.

        With weights_on_host, weights are in slabs of pinned memory (offload/pinned.py), and torch rounds the pinned
        memory of each gradient up to a power of two. The gradients that a backward pass is bringing are those of three
        parameter groups. With a step in backward there are no others. Without, there are those of all parameters, and
        with accumulation those of the three groups beside them. With ``offload="device"`` there are errors and states
        alone, all of them pinned.
        """
        sizes = self.static_bytes(techniques)
        if techniques.offload == "device":
            return math.ceil((1 + UNUSED_OF_SLABS) * (sizes.errors + sizes.optimizer))
        gradients, weights = sizes.gradients, sizes.parameters
        if techniques.host_copies:
            weights = 4 * sizes.count
        if techniques.weights_on_host:
            largest_group = max(sizes.block, sizes.embedding, sizes.output_layer, sizes.root_on_host)
            under_way = min(gradients, 2 * sizes.block + largest_group)
            if techniques.step_in_backward:
                gradients = under_way
            elif techniques.accumulation > 1:
                gradients += under_way
            gradients = math.ceil(gradients * sizes.pinned / max(1, sizes.parameters))
            weights = math.ceil((1 + UNUSED_OF_SLABS) * weights)
        return weights + sizes.errors + sizes.optimizer + gradients

    def _peaks(self, techniques: Techniques, traces: Sequence[Any], more_blocks: int, free_gradients: bool) -> Any:
        """The bytes at each pass's peak by category, with weights that are gathered or copied from the host for it."""
        from .shards import ShardedWeights, WeightsOnHost
        from .trace import peaks

        sizes = self.static_bytes(techniques)
        groups: Any = None
        if self.devices > 1:
            root, shard = sizes.outside_blocks, sizes.outside_blocks // self.devices
            groups = ShardedWeights(root, sizes.block, shard, UNRELEASED[self.device])
        if techniques.weights_on_host:
            groups = WeightsOnHost(
                sizes.embedding, sizes.block, sizes.output_layer, sizes.root_on_host, sizes.block_tensor
            )
        key = (tuple(map(id, traces)), more_blocks, free_gradients, groups)  # ids of traces that are kept
        if key not in self._known_peaks:
            self._known_peaks[key] = peaks(
                traces, more_blocks, extra_bytes=groups and groups.extra_bytes, free_gradients=free_gradients,
                unit=UNIT[self.device], devices=self.devices, weights_on_host=bool(techniques.weights_on_host),
            )  # fmt: skip
        return self._known_peaks[key]

    def seconds(self, techniques: Techniques) -> float:
        """Seconds of a step."""
        return seconds(
            self.hardware,
            techniques,
            self.static_bytes(techniques),
            tokens=self.source.tokens,
            attention=self.source.attention * self.source.tokens,
            compiled=COMPILED[self.device][techniques.saved_bits] if techniques.compile else 1.0,
            brought=self._brought(techniques),
        )
