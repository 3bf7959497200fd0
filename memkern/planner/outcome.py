"""A plan: the outcome of ``memkern.plan`` as data, text, lines of code or a picture."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..flags import typed
from .code import training_loop
from .prediction import BAND, CATEGORIES, Change, Prediction

MIB, GIB = 2**20, 2**30
HEADS = ("weights", "errors", "grads", "optim.", "saved", "temp.", "process")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The outcome of :func:`memkern.plan`; ``print`` shows it.

    alone: a prediction for each technique by itself. together: the smallest step, with all of them but randomized
    linear layers. recommended: the fastest that fits, None where nothing does. largest_micro_batch: with the
    recommended techniques, 0 where nothing fits. counted_on: the fake tensors, a key of ``BAND``. band: shares by which
    the truth may be above and below a prediction. What is recommended fits even if the truth is above by the band.
    changes: where nothing fits, the changes that are enough by themselves; if there are none, all that help.
    fits_as_it_is: whether plain fp32 training does, with the whole batch at once. loss: how ``code()`` computes it.
    host_memory: the limit on the host, if there is one. link: bytes per second between host and device. ways: the
    fastest that fits with each of the ways of saving less for the backward pass, None where nothing does. ruled_out:
    the rows of techniques with which the model's step raises, with the error. devices: how many share the model
    (``fully_shard``). tensor_parallel: how many share its layers. Bytes are those of one.
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
    changes: tuple[Change, ...] = ()
    fits_as_it_is: bool = False
    loss: str = "model(**batch).loss"
    host_memory: int | None = None
    link: float = 0.0
    ways: dict[str, Prediction | None] = dataclasses.field(default_factory=dict)
    ruled_out: dict[str, str] = dataclasses.field(default_factory=dict)
    devices: int = 1
    tensor_parallel: int = 1

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
            "ways": {name: row(p) for name, p in self.ways.items()},
        }

    def code(self) -> str:
        """The lines that do what is recommended (or what is smallest, where nothing fits) in a loop of one's own."""
        techniques = (self.recommended or self.together).techniques
        return training_loop(techniques, self.loss, self.device, _sample(self), self.devices, self.tensor_parallel)

    def __str__(self) -> str:
        return text(self)


def rows(plan: Plan) -> Iterator[tuple[str, Prediction]]:
    """Every prediction with its name."""
    yield from plan.alone.items()
    yield "all together", plan.together
    if plan.recommended is not None:
        yield "recommended", plan.recommended


def text(plan: Plan) -> str:
    above, below = plan.band
    unit, name_of_unit, digits = (GIB, "GiB", 2) if _is_large(plan) else (MIB, "MiB", 1)
    plain = next(iter(plan.alone.values()))
    size = plain.techniques.micro_batch
    base = plain.seconds / size
    lines = [
        f"{plan.model}: {plan.parameters:,} parameters, {_length(plan)}{plan.device}; "
        f"{_shards(plan)}limit {plan.memory / unit:.{digits}f} {name_of_unit}",
        f"peak of a step in {name_of_unit}, {_count(size, _sample(plan))}; time against plain training; truth within "
        f"-{below:.0%} and +{above:.0%} (counted on fake tensors: {plan.counted_on})",
        "",
        f"{'':<32}{'peak':>8}{'time':>7}  " + "".join(f"{head:>9}" for head in HEADS),
    ]
    for name, p in rows(plan):
        cells = "".join(
            f"{p.categories[c] / unit:>9.{digits}f}" if p.categories[c] else f"{'-':>9}" for c in CATEGORIES
        )
        sequences = p.techniques.micro_batch * p.techniques.accumulation
        fits = " " if p.peak * (1 + above) <= plan.memory else "!"
        lines.append(f"{name:<32}{p.peak / unit:>8.{digits}f}{fits}{p.seconds / sequences / base:>5.2f}x  {cells}")
    lines += [f"{name}: not with this model. {reason}" for name, reason in plan.ruled_out.items()]
    if any(p.peak * (1 + above) > plan.memory for _, p in rows(plan)):
        lines.append("! may need more than the limit")
    lines += ["", *verdict(plan)]
    return "\n".join(lines)


def _is_large(plan: Plan) -> bool:
    """Whether the model's own bytes are worth printing in GiB."""
    return max(p.peak - p.categories["process and context"] for _, p in rows(plan)) >= GIB


def _sample(plan: Plan) -> str:
    return "sequence" if plan.seq_len > 1 else "example"


def _count(size: int, sample: str) -> str:
    return f"{size} {sample}s" if size > 1 else f"one {sample}"


def _length(plan: Plan) -> str:
    return f"{plan.seq_len} tokens, " if plan.seq_len > 1 else ""


def _shards(plan: Plan) -> str:
    if plan.tensor_parallel > 1:
        return f"on each of {plan.tensor_parallel} devices with tensor parallelism; "
    return f"on each of {plan.devices} devices with fully_shard; " if plan.devices > 1 else ""


def rounded_up(size: int) -> str:
    """GiB, rounded up to two decimals."""
    return f"{math.ceil(100 * size / GIB) / 100:.2f}"


def verdict(plan: Plan) -> Iterator[str]:
    p = plan.recommended
    if p is None:
        yield f"Does not fit: the least that could is {rounded_up(plan.least)} GiB, with {plan.together.techniques}."
        yield from would_fit(plan)
        return
    if plan.fits_as_it_is:
        yield "Fits as it is: plain training needs no more than the limit."
    yield f"{'The fastest that fits' if plan.fits_as_it_is else 'Fits'}: {p.techniques}."
    yield f"Largest micro-batch with these: {plan.largest_micro_batch}."
    if p.balance:
        yield _roofline(p)
    if p.host:
        yield f"On the host: {p.host / GIB:.2f} GiB."
    if p.brought:
        yield _streams(plan, p)
    yield from _ways(plan, p)
    yield "In a loop of your own:"
    yield ""
    yield plan.code()


def _roofline(p: Prediction) -> str:
    limit = "arithmetic limits them" if p.intensity >= p.balance else "memory limits them"
    return (
        f"Roofline: the passes have {p.intensity:,.0f} operations for each byte of weights and saved tensors that they "
        f"move, this device {p.balance:,.0f} for each of its memory: {limit}, and memory limits the optimizer's step."
    )


def _streams(plan: Plan, p: Prediction) -> str:
    assert p.streamed_from is not None
    weights, step = p.streamed_from
    hides = f", the backward pass's the host's step from {step:,}" if p.techniques.step_in_backward else ""
    return (
        f"Weights: {p.brought / GIB:.2f} GiB to the device in each pass, and gradients back, at "
        f"{plan.link / 1e9:g} GB/s {p.brought / plan.link:.2f} s; a forward pass's arithmetic hides that from "
        f"{weights:,} tokens of a micro-batch on{hides}."
    )


def _ways(plan: Plan, best: Prediction) -> Iterator[str]:
    """How much longer a step takes with each way of saving less for the backward pass."""
    if not plan.ways:
        return
    times = (
        f"{name} {p.seconds / best.seconds:.2f}x" if p is not None else f"{name} do not fit"
        for name, p in plan.ways.items()
    )
    yield f"The fastest that fits with each way of saving less, time against this: {', '.join(times)}."


def would_fit(plan: Plan) -> Iterator[str]:
    """Where nothing fits: the changes that would, as they are typed, each with the memory that it needs."""
    changes = [c for c in plan.changes if c.name != "all of these"]
    every = [f"{typed(c.name, c.value)} ({rounded_up(c.memory)} GiB)" for c in changes]
    if not every:
        return
    if plan.changes[0].memory <= plan.memory:
        yield f"What would fit, each by itself: {', '.join(every)}."
        return
    yield f"Not enough by themselves: {', '.join(every)}."
    last = plan.changes[-1]
    if len(plan.changes) > len(every):
        enough = "fit" if last.memory <= plan.memory else "do not fit either"
        yield f"All of these together {enough}: {rounded_up(last.memory)} GiB."


def write_png(path: Path, plan: Plan) -> None:
    """Stacked bars: the categories of every prediction, and the limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = list(rows(plan))[::-1]
    figure, axes = plt.subplots(figsize=(10, 0.4 * len(shown) + 1.5))
    left = [0.0] * len(shown)
    for category in CATEGORIES:
        sizes = [p.categories[category] / GIB for _, p in shown]
        axes.barh([name for name, _ in shown], sizes, left=left, label=category)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.axvline(plan.memory / GIB, color="black", linestyle="--", label="limit")
    axes.set_xlabel(f"GiB at the peak of a step, {plan.model}, {_length(plan)}{plan.device}")
    axes.legend(fontsize="small", loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
