"""``memkern.plan``: what a training step needs with each technique, and which of them to use."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from . import fake_cuda
from .hardware import DEFAULTS, Hardware, default, seconds
from .techniques import TechniqueError, Techniques

CATEGORIES = (
    "parameters",
    "errors",
    "gradients",
    "optimizer",
    "saved activations",
    "temporaries",
    "process and context",
)
PHASES = ("begin", "forward", "backward", "step")
UNIT = {"cpu": 64, "cuda": 512}
"""What the allocator rounds sizes up to."""
ALLOCATED_BY_A_STEP = ("gradients", "saved activations", "temporaries")
MARGIN = {"cpu": 0.02, "cuda": 0.03, "cuda, on fake CPU tensors": 0.15}
"""Of what a step has allocated: for scratch memory inside of operators, which is not seen, and for fragmentation."""
BAND = {"cpu": (0.01, 0.05), "cuda": (0.01, 0.07), "cuda, on fake CPU tensors": (0.05, 0.25)}
"""How far the truth may be above a prediction, and below it."""

ALONE: dict[str, dict[str, Any]] = {
    "as it is": {},
    "checkpoint every block": {"checkpointing": "blocks"},
    "checkpoint every sqrt(L) blocks": {"checkpointing": "sqrt"},
    "bf16 autocast": {"precision": "amp"},
    "8-bit states": {"state_bits": 8},
    "3-bit activations": {"activation_bits": 3},
    "saved tensors once (exact)": {"saved_bits": "exact"},
    "saved tensors in 8 bits": {"saved_bits": 8},
    "randomized linear, 20 %": {"randomized_linear": 0.2},
    "bf16 weights, 8-bit errors": {"precision": "bf16", "master_weights": "bf16+8"},
    "step in backward": {"step_in_backward": True, "accumulation": 1},
    "loss in chunks": {"loss_chunk": 4096},
    "offload": {"offload": True},
}
"""The rows of the table: each technique by itself."""

PRECISIONS: tuple[dict[str, Any], ...] = (
    {"precision": "fp32"},
    {"precision": "amp"},
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
"""What is chosen from for activations, from the most memory to the least."""
LOSS_CHUNK = 4096  # classes
MAX_MICRO_BATCH = 4096


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a step with given techniques needs.

    categories: bytes at the peak, by ``CATEGORIES``. phases: the peak of each of ``PHASES``, process included.
    host: bytes on the host with offload: weights, states, and buffers for the transfers. seconds: of an optimizer step,
    by the model of memkern/planner/hardware.py.
    """

    techniques: Techniques
    categories: dict[str, int]
    phases: dict[str, int]
    host: int
    seconds: float

    @property
    def peak(self) -> int:
        return sum(self.categories.values())


@dataclasses.dataclass(frozen=True)
class Plan:
    """The outcome of :func:`memkern.plan`; ``print`` shows it.

    alone: a prediction for each technique by itself. together: the smallest step, with all of them but randomized
    linear layers. recommended: the fastest that fits, None where nothing does. largest_micro_batch: with the
    recommended techniques, 0 where nothing fits. counted_on: the fake tensors, a key of ``BAND``. band: shares by which
    the truth may be above and below a prediction. What fits does so where the truth is above by so much, too.
    """

    model: str
    parameters: int
    device: str
    seq_len: int
    memory: int
    alone: dict[str, Prediction]
    together: Prediction
    recommended: Prediction | None
    largest_micro_batch: int
    counted_on: str

    @property
    def fits(self) -> bool:
        return self.recommended is not None

    @property
    def band(self) -> tuple[float, float]:
        return BAND[self.counted_on]

    @property
    def least(self) -> int:
        """The memory that the smallest step fits in."""
        return math.ceil(self.together.peak * (1 + self.band[0]))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""

        def row(p: Prediction | None) -> Any:
            return None if p is None else dataclasses.asdict(p) | {"peak": p.peak}

        return dataclasses.asdict(self) | {
            "fits": self.fits,
            "least": self.least,
            "band": list(self.band),
            "alone": {name: row(p) for name, p in self.alone.items()},
            "together": row(self.together),
            "recommended": row(self.recommended),
        }

    def code(self) -> str:
        """The lines that do what is recommended (or what is smallest, where nothing fits) in a loop of one's own."""
        from .report import code

        return code(self)

    def __str__(self) -> str:
        from .report import text

        return text(self)


def parse_memory(given: Any) -> int:
    """Bytes: a whole number, or a text such as "12GiB", "11.5 GiB", "800MB".

    Raises:
        TechniqueError: anything else, and 0.
    """
    factors = {"": 1, "b": 1} | {
        f"{prefix}{ending}": base**power
        for power, prefix in enumerate("kmgt", 1)
        for ending, base in (("b", 1000), ("ib", 1024))
    }
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(given).lower())
    if isinstance(given, bool) or match is None or match[2] not in factors or not float(match[1]):
        raise TechniqueError("memory", given, "bytes as a number, or with a unit: 12GiB, 800MB")
    return int(float(match[1]) * factors[match[2]])


class Planner:
    """Predictions for one model on one device. Traces and sizes are made once for all techniques that share them."""

    def __init__(self, source: Any, device: str, counted_on: str, hardware: Hardware) -> None:
        from . import step

        self.source, self.device, self.counted_on, self.hardware = source, device, counted_on, hardware
        fake_device = "cuda" if counted_on == "cuda" else "cpu"
        self._traces = functools.cache(lambda techniques: step.traces(source, techniques, fake_device))
        self._fixed = functools.cache(lambda techniques: step.fixed(source, techniques, fake_device))
        self.predict = functools.cache(self._predict)

    def traces(self, techniques: Techniques) -> Any:
        return self._traces(
            techniques.replace(
                optimizer="AdamW",
                state_bits=32,
                master_weights=None,
                step_in_backward=False,
                offload=False,
                accumulation=1,
            )
        )

    def fixed(self, techniques: Techniques) -> Any:
        precision = "bf16" if techniques.precision == "bf16" else "fp32"
        kept = {name: getattr(techniques, name) for name in ("optimizer", "state_bits", "master_weights")}
        if techniques.host_copies:
            kept["master_weights"] = None
        return self._fixed(Techniques(precision=precision, **kept))

    def floor(self, techniques: Techniques) -> int:
        """Bytes below which the peak cannot be: found without a trace."""
        fixed = self.fixed(techniques)
        whole = not (techniques.step_in_backward or techniques.offload)
        held = 0 if techniques.offload else fixed.errors + fixed.optimizer
        return self.hardware.process + fixed.parameters + held + (fixed.gradients if whole else fixed.largest)

    def _predict(self, techniques: Techniques) -> Prediction:
        from .trace import peaks

        fixed, (traces, more) = self.fixed(techniques), self.traces(techniques)
        leaves = techniques.step_in_backward or (techniques.offload and self.device != "cpu")
        accumulates = techniques.accumulation > 1 and not leaves
        on_host = techniques.offload and self.device != "cpu"
        copies = 4 * fixed.count if techniques.host_copies else fixed.parameters if on_host else 0
        static = {
            "parameters": fixed.parameters,
            "errors": 0 if on_host else fixed.errors + copies,
            "gradients": fixed.gradients if accumulates else 0,
            "optimizer": 0 if on_host else fixed.optimizer,
            "process and context": self.hardware.process,
        }
        unit = UNIT[self.device]
        found = peaks(traces, more, free_gradients=leaves or accumulates, unit=unit)
        rows = {
            phase: static
            | {
                "gradients": static["gradients"] + peak["gradients"],
                "saved activations": peak["saved"],
                "temporaries": peak["temporaries"]
                + (fixed.step_temporaries if techniques.step_in_backward and phase == "backward" else 0),
            }
            for phase, peak in found.items()
        }
        rows["begin"] = static
        rows["step"] = static | {
            "gradients": 0 if leaves else fixed.gradients,
            "temporaries": 0 if on_host else fixed.step_temporaries,
        }
        for row in rows.values():
            allocated = sum(row.get(name, 0) for name in ALLOCATED_BY_A_STEP)
            row["temporaries"] = row.get("temporaries", 0) + int(MARGIN[self.counted_on] * allocated)
        sums = {phase: sum(rows[phase].values()) for phase in PHASES}
        largest = rows[max(sums, key=sums.__getitem__)]
        return Prediction(
            techniques,
            {name: largest.get(name, 0) for name in CATEGORIES},
            sums,
            copies + fixed.errors + fixed.optimizer + fixed.gradients if on_host else 0,
            self.seconds(techniques),
        )

    def seconds(self, techniques: Techniques) -> float:
        fixed = self.fixed(techniques)
        plain = Techniques(precision=techniques.precision, micro_batch=techniques.micro_batch)
        return seconds(
            self.hardware,
            techniques,
            parameters=fixed.count,
            head=fixed.head,
            tokens=self.source.tokens,
            saved=self._saved(plain) if techniques.saved_bits else 0,
            weight_bytes=fixed.parameters,
            state_bytes=fixed.optimizer + fixed.errors,
        )

    def _saved(self, techniques: Techniques) -> int:
        """Bytes that a micro-batch saves for its backward pass."""
        traces, more = self.traces(techniques)
        return traces[0].saved + more * (traces[-1].saved - traces[0].saved)

    # ---- the choice

    @functools.cached_property
    def saving(self) -> tuple[dict[str, Any], ...]:
        """``SAVING``, without checkpoints for a model that has no list of like blocks."""
        import torch

        from .checkpointing import block_lists
        from .models import Given

        if isinstance(self.source, Given):
            model = self.source.model
        else:
            with torch.device("meta"):
                model = self.source.build(torch.float32)
        has_blocks = any(True for _ in block_lists(model))
        return SAVING if has_blocks else tuple(each for each in SAVING if "checkpointing" not in each)

    def frugal(self, techniques: Techniques, pinned: Mapping[str, Any]) -> Techniques:
        """The same optimizer and weights, with the least activations."""
        chunk = LOSS_CHUNK if self.source.is_language_model else None
        return techniques.replace(**({**self.saving[-1], "loss_chunk": chunk} | dict(pinned)))

    def candidates(self, pinned: Mapping[str, Any], batch_size: int, clip: bool) -> list[Techniques]:
        """Every set that may be recommended. Randomized linear layers only where they are asked for."""
        chunks = (None, LOSS_CHUNK) if self.source.is_language_model else (None,)
        offloads = (False,) if self.device == "cpu" else (False, True)
        whole = {"micro_batch": batch_size, "accumulation": 1}
        shapes = [whole, {"micro_batch": 1, "accumulation": batch_size}]
        if not clip:
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
            with contextlib.suppress(TechniqueError):  # not together with what is pinned
                techniques = Techniques(**(choices | dict(pinned)))
                if not (clip and techniques.step_in_backward):
                    found[techniques] = None
        return list(found)

    def choose(
        self, memory: int, pinned: Mapping[str, Any], batch_size: int, clip: bool
    ) -> Prediction | None:
        """The fastest that fits; of those within 2 % of its time the one that changes least."""
        found = [t for t in self.candidates(pinned, batch_size, clip) if self.floor(t) <= memory]
        found.sort(key=lambda t: (round(math.log(self.seconds(t)) / 0.02), _changes(t)))
        for techniques in found:
            if (
                self.predict(self.frugal(techniques, pinned)).peak <= memory
                and (prediction := self.predict(techniques)).peak <= memory
            ):
                return prediction
        return None

    def largest_micro_batch(self, techniques: Techniques, memory: int) -> int:
        """The most sequences of a forward pass that fit; ``techniques`` do."""

        def peak(size: int) -> int:
            return self.predict(techniques.replace(micro_batch=size)).peak

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
    return sum(given != plain for given, plain in pairs)


def plan(
    model: Any,
    *,
    memory: int | str,
    seq_len: int | None = None,
    inputs: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    device: str = "cuda",
    techniques: Techniques | Mapping[str, Any] | None = None,
    batch_size: int = 1,
    clip: bool = False,
    dropout: float | None = None,
    hardware: Hardware | None = None,
) -> Plan:
    """What a training step of a model needs, by category and technique, and what to use so that it fits.

    The model's own modules run forward and backward on fake tensors, which compute nothing; every storage is followed
    from the operator that allocates it until it is freed. For ``device="cuda"`` in a process of its own with fake CUDA
    tensors where there is a compiler, or in this one where torch has a GPU; else on fake CPU tensors, which differ
    in attention and dropout masks. ``Plan.band`` says how far predictions may be off; they err high.

    Args:
        model: a built-in name (``memkern.planner.models.MODELS``: gpt2-xl, bert-base, llama-2-7b, vit-base, ...), a
            folder with a transformers model, a transformers configuration, or a torch.nn.Module, which is left as is.
        memory: bytes, or a text such as "12GiB": all that a process may use on the device, context included.
        seq_len: tokens of a sequence; for configurations, but not for images.
        inputs: for a module, a batch: a tensor, a tuple of arguments or a dict of keyword arguments, whose tensors
            have the batch as their first dimension.
        loss: ``loss(model, batch)`` returns the loss; by default the output's ``loss``, the output where it is
            one number, else the sum of the first tensor of the output.
        device: "cuda" or "cpu".
        techniques: None, to choose among all; a mapping of fields of :class:`Techniques` that are given, to choose the
            others; or Techniques, to predict just these.
        batch_size: sequences of an optimizer step. Several may be accumulated, which rules a step in backward out.
        clip: whether gradients are clipped by the norm of all of them, which rules a step in backward out too.
        dropout: all of the configuration's dropout rates; None, as they are.
        hardware: speeds; by default those of a card of 12 GB, or of two CPU cores.

    Raises:
        TechniqueError: an argument that cannot be used, with what was given and what is allowed.
        TypeError: model is none of the above.
    """
    from .models import resolve

    limit = parse_memory(memory)
    if device not in DEFAULTS:
        raise TechniqueError("device", device, "cuda or cpu")
    if not isinstance(batch_size, int) or batch_size < 1:
        raise TechniqueError("batch_size", batch_size, "a whole number, 1 or more")
    pinned = dataclasses.asdict(techniques) if isinstance(techniques, Techniques) else dict(techniques or {})
    _check_pinned(pinned)
    source = resolve(model, seq_len, inputs, loss, dropout)
    arguments: dict[str, Any] = {
        "memory": limit,
        "device": device,
        "pinned": pinned,
        "batch_size": batch_size,
        "clip": clip,
    }
    arguments |= {"source": source, "hardware": hardware or default(device)}
    if device == "cpu":
        return _plan(counted_on="cpu", **arguments)
    return _plan_for_cuda(arguments)


def _check_pinned(pinned: Mapping[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(Techniques)]
    for name in pinned:
        if name not in names:
            raise TechniqueError("techniques", name, ", ".join(names))
    # Alone or with what it needs, each must be allowed; what excludes each other shows when all are together.
    Techniques(**({"precision": "bf16"} if pinned.get("master_weights") else {}) | dict(pinned))


def _plan_for_cuda(arguments: dict[str, Any]) -> Plan:
    """In a process with fake CUDA, in this one where torch has a GPU, else on fake CPU tensors."""
    import torch

    if torch.cuda.is_available():
        return _plan(counted_on="cuda", **arguments)
    if torch.version.cuda is None and fake_cuda.compiler() is not None:
        try:
            request = pickle.dumps((_plan, {"counted_on": "cuda", **arguments}))
            return fake_cuda.call(request)
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            warnings.warn(
                f"memkern.plan counts on fake CPU tensors, with a wider band: {error}", stacklevel=3
            )
    return _plan(counted_on="cuda, on fake CPU tensors", **arguments)


def _plan(
    *,
    source: Any,
    memory: int,
    device: str,
    counted_on: str,
    pinned: dict[str, Any],
    batch_size: int,
    clip: bool,
    hardware: Hardware,
) -> Plan:
    planner = Planner(source, device, counted_on, hardware)
    alone = {}
    for name, changes in ALONE.items():
        if "loss_chunk" in changes and not source.is_language_model:
            continue
        if name == "offload" and device == "cpu":
            continue
        with contextlib.suppress(TechniqueError):
            alone[name] = planner.predict(Techniques(**changes))
    candidates = planner.candidates(pinned, batch_size, clip)
    together = planner.predict(planner.frugal(min(candidates, key=planner.floor), pinned))
    limit = int(memory / (1 + BAND[counted_on][0]))
    best = planner.choose(limit, pinned, batch_size, clip)
    largest = 0
    if best is not None:
        largest = planner.largest_micro_batch(best.techniques, limit)
        if best.techniques.accumulation > 1 and "micro_batch" not in pinned:
            micro = max(size for size in range(1, largest + 1) if batch_size % size == 0)
            more = best.techniques.replace(micro_batch=micro, accumulation=batch_size // micro)
            best = planner.predict(more)
    return Plan(
        source.name,
        planner.fixed(Techniques()).count,
        device,
        source.tokens,
        memory,
        alone,
        together,
        best,
        largest,
        counted_on,
    )
