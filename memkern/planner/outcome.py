"""A plan: the outcome of ``memkern.plan`` as data, text, or lines of code."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from ..techniques.options import Techniques
from .prediction import BAND, CATEGORIES, Prediction

MIB, GIB = 2**20, 2**30
HEADS = ("weights", "errors", "grads", "optim.", "saved", "temp.", "process")  # of the columns, one per CATEGORIES


@dataclasses.dataclass(frozen=True)
class Plan:
    """The outcome of :func:`memkern.plan`; ``print`` shows it.

    alone: a prediction for each technique by itself. together: the smallest step, with all of them but randomized
    linear layers. recommended: the fastest that fits, None where nothing does. largest_micro_batch: sequences with the
    recommended techniques, 0 where nothing fits. counted_on: the fake tensors, a key of ``BAND``. band: shares of a
    prediction by which the real peak may be above and below it. What is recommended fits even at the band's upper end.
    fits_as_it_is: whether plain fp32 training fits, with the whole batch at once. loss: the expression that ``code()``
    has for it. link: bytes per second between host and device. ruled_out: by its row, each technique with which the
    model's step raises, and the error. devices: how many share the model (``fully_shard``); bytes are those of one.
    not_on_cuda: why a plan for "cuda" was counted on fake CPU tensors.
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
    fits_as_it_is: bool = False
    loss: str = "model(**batch).loss"
    link: float = 0.0
    ruled_out: dict[str, str] = dataclasses.field(default_factory=dict)
    devices: int = 1
    not_on_cuda: str | None = None

    @property
    def fits(self) -> bool:
        return self.recommended is not None

    @property
    def band(self) -> tuple[float, float]:
        return BAND[self.counted_on]

    @property
    def least(self) -> int:
        """Bytes in which the smallest step fits even if it needs more than predicted, by the band."""
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
        techniques = (self.recommended or self.together).techniques
        return training_loop(techniques, self.loss, self.device, _sample(self), self.devices)

    def __str__(self) -> str:
        return text(self)


def rows(plan: Plan) -> Iterator[tuple[str, Prediction]]:
    """Every prediction with its name."""
    yield from plan.alone.items()
    yield "all together", plan.together
    if plan.recommended is not None:
        yield "recommended", plan.recommended


def text(plan: Plan) -> str:
    """The plan as printed: a table of the predictions, and the verdict."""
    above, below = plan.band
    is_large = max(p.peak - p.categories["process and context"] for _, p in rows(plan)) >= GIB
    unit, unit_name, digits = (GIB, "GiB", 2) if is_large else (MIB, "MiB", 1)
    plain = next(iter(plan.alone.values()))
    size = plain.techniques.micro_batch
    plain_time = plain.seconds / size
    tokens = f"{plan.seq_len} tokens, " if plan.seq_len > 1 else ""
    shards = f"on each of {plan.devices} devices with fully_shard; " if plan.devices > 1 else ""
    count = f"{size} {_sample(plan)}s" if size > 1 else f"one {_sample(plan)}"
    lines = [
        f"{plan.model}: {plan.parameters:,} parameters, {tokens}{plan.device}; "
        f"{shards}limit {plan.memory / unit:.{digits}f} {unit_name}",
        f"peak of a step in {unit_name}, {count}; time against plain training; truth within "
        f"-{below:.0%} and +{above:.0%} (counted on fake tensors: {plan.counted_on})",
        *([f"Not counted on fake CUDA tensors: {plan.not_on_cuda}."] if plan.not_on_cuda else []),
        "",
        f"{'':<32}{'peak':>8}{'time':>7}  " + "".join(f"{head:>9}" for head in HEADS),
    ]
    for name, p in rows(plan):
        cells = "".join(
            f"{p.categories[c] / unit:>9.{digits}f}" if p.categories[c] else f"{'-':>9}" for c in CATEGORIES
        )
        sequences = p.techniques.micro_batch * p.techniques.accumulation
        fits = " " if p.peak * (1 + above) <= plan.memory else "!"
        lines.append(
            f"{name:<32}{p.peak / unit:>8.{digits}f}{fits}{p.seconds / sequences / plain_time:>5.2f}x  {cells}"
        )
    lines += [f"{name}: not with this model. {reason}" for name, reason in plan.ruled_out.items()]
    if any(p.peak * (1 + above) > plan.memory for _, p in rows(plan)):
        lines.append("! may need more than the limit")
    lines += ["", *verdict(plan)]
    return "\n".join(lines)


def _sample(plan: Plan) -> str:
    return "sequence" if plan.seq_len > 1 else "example"


LESS = "Fewer or shorter sequences need less, and so may techniques that are not given"


def rounded_up(size: int) -> str:
    """GiB, rounded up to two decimals."""
    return f"{math.ceil(100 * size / GIB) / 100:.2f}"


def verdict(plan: Plan) -> Iterator[str]:
    """The lines below the table: what fits, with its training loop, or the least that could."""
    p = plan.recommended
    if p is None:
        yield f"Does not fit: the least that could is {rounded_up(plan.least)} GiB, with {plan.together.techniques}."
        yield f"{LESS}."
        return
    if plan.fits_as_it_is:
        yield "Fits as it is: plain training needs no more than the limit."
    yield f"{'The fastest that fits' if plan.fits_as_it_is else 'Fits'}: {p.techniques}."
    yield f"Largest micro-batch with these: {plan.largest_micro_batch}."
    if p.host:
        yield f"On the host: {p.host / GIB:.2f} GiB."
    if p.brought:
        yield (
            f"Weights: {p.brought / GIB:.2f} GiB to the device in each pass, and gradients back: "
            f"{p.brought / plan.link:.2f} s at {plan.link / 1e9:g} GB/s."
        )
    yield "In a loop of your own:"
    yield ""
    yield plan.code()


def training_loop(techniques: Techniques, loss: str, device: str, sample: str, devices: int = 1) -> str:
    """The lines of a training loop with these techniques.

    loss: the expression for the loss of ``batch``. sample: what a batch consists of, "sequence" or "example".
    """
    names = [field.name for field in dataclasses.fields(techniques) if getattr(techniques, field.name) != field.default]
    of_the_loop = ("micro_batch", "accumulation")
    given = ", ".join(f"{name}={getattr(techniques, name)!r}" for name in names if name not in of_the_loop)
    set_up = ["import torch, memkern", "", f"techniques = memkern.Techniques({given})"]
    if techniques.precision == "bf16":
        set_up.append("model.to(torch.bfloat16)")
    model = "with_loss" if techniques.loss_chunk else "model"
    set_up += [*_chunked_lines(techniques), f"memkern.apply({model}, techniques)"]
    if devices > 1:
        set_up += [
            f"# torchrun --nproc-per-node {devices}; blocks: the model's, such as model.model.layers",
            "for module in (*blocks, model):",
            "    torch.distributed.fsdp.fully_shard(module)",
        ]
    params = "model.parameters()"
    if techniques.optimizer_class == "Muon":
        params = "memkern.optim.muon_groups(model, lr=lr, adamw_lr=lr)"
    set_up.append(f"optimizer = memkern.make_optimizer({params}, techniques, lr=lr)")
    body = [f"batch = next(batches)  # {techniques.micro_batch} {sample}{'s' * (techniques.micro_batch > 1)}"]
    forward = [f"loss = {'with_loss(batch)' if techniques.loss_chunk else loss}"]
    if techniques.autocast:
        dtype = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[techniques.autocast]
        forward = [f'with torch.autocast("{device}", {dtype}):', *(f"    {line}" for line in forward)]
    loss_term = f"(loss / {techniques.accumulation})" if techniques.accumulation > 1 else "loss"
    if is_scaled := techniques.precision == "fp16-mixed":
        set_up.append(f'scaler = torch.amp.GradScaler("{device}")')
        loss_term = f"scaler.scale({loss_term.strip('()')})"
    body += [*forward, f"{loss_term}.backward()" + ("  # takes the steps" if techniques.step_in_backward else "")]
    if techniques.accumulation > 1:
        body = [f"for _ in range({techniques.accumulation}):", *(f"    {line}" for line in body)]
    body += ["scaler.step(optimizer)", "scaler.update()"] if is_scaled else ["optimizer.step()"]
    body.append("optimizer.zero_grad()")
    return "\n".join([*set_up, "for step in range(steps):", *(f"    {line}" for line in body)])


def _chunked_lines(techniques: Techniques) -> list[str]:
    """The lines of a module that holds a language model and its loss in chunks of classes."""
    if not techniques.loss_chunk:
        return []
    return [
        "",
        "class WithLoss(torch.nn.Module):",
        "    def __init__(self, model):",
        "        super().__init__()",
        "        self.model, head = model, model.get_output_embeddings()",
        f"        self.loss = memkern.nn.LinearCrossEntropy.from_linear(head, chunk_size={techniques.loss_chunk})",
        "    def forward(self, batch):",
        '        hidden = self.model.base_model(batch["input_ids"], use_cache=False).last_hidden_state',
        '        return self.loss(hidden[:, :-1], batch["labels"][:, 1:])',
        "",
        "with_loss = WithLoss(model)",
    ]
