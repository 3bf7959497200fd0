"""A plan as a text, a picture, and lines of code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from .planning import Plan
from .prediction import CATEGORIES, Prediction
from .smaller import Change
from .techniques import Techniques

MIB, GIB = 2**20, 2**30
HEADS = ("weights", "errors", "grads", "optim.", "saved", "temp.", "process")


def rows(plan: Plan) -> Iterator[tuple[str, Prediction]]:
    """Every prediction with its name."""
    yield from plan.alone.items()
    yield "all together", plan.together
    if plan.recommended is not None:
        yield "recommended", plan.recommended


def text(plan: Plan) -> str:
    above, below = plan.band
    unit, name_of_unit, digits = (GIB, "GiB", 2) if _is_large(plan) else (MIB, "MiB", 1)
    base = next(iter(plan.alone.values())).seconds / next(iter(plan.alone.values())).techniques.micro_batch
    lines = [
        f"{plan.model}: {plan.parameters:,} parameters, {_length(plan)}{plan.device}; "
        f"limit {plan.memory / unit:.{digits}f} {name_of_unit}",
        f"peak of a step in {name_of_unit}, one {_sample(plan)}; time against plain training; truth within "
        f"-{below:.0%} and +{above:.0%} (counted on {plan.counted_on})",
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
            f"{name:<32}{p.peak / unit:>8.{digits}f}{fits}{p.seconds / sequences / base:>5.2f}x  {cells}"
        )
    if any(p.peak * (1 + above) > plan.memory for _, p in rows(plan)):
        lines.append("! may need more than the limit")
    lines += ["", *verdict(plan)]
    return "\n".join(lines)


def _is_large(plan: Plan) -> bool:
    """Whether GiB with two decimals say something of the model's own bytes."""
    return max(p.peak - p.categories["process and context"] for _, p in rows(plan)) >= GIB


def _sample(plan: Plan) -> str:
    return "sequence" if plan.seq_len > 1 else "example"


def _length(plan: Plan) -> str:
    return f"{plan.seq_len} tokens, " if plan.seq_len > 1 else ""


def rounded_up(size: int) -> str:
    """GiB with two decimals, which are enough."""
    return f"{math.ceil(100 * size / GIB) / 100:.2f}"


def verdict(plan: Plan) -> Iterator[str]:
    p = plan.recommended
    if p is None:
        yield f"Does not fit: the least that could is {rounded_up(plan.least)} GiB, with {plan.together.techniques}."
        yield from would_fit(plan, option)
        return
    if plan.fits_as_it_is:
        yield "Fits as it is: plain training needs no more than the limit."
    yield f"{'The fastest that fits' if plan.fits_as_it_is else 'Fits'}: {p.techniques}."
    yield f"Largest micro-batch with these: {plan.largest_micro_batch}."
    if p.host:
        yield f"On the host: {p.host / GIB:.2f} GiB."
    yield "In a loop of your own:"
    yield ""
    yield plan.code()


def would_fit(plan: Plan, option: Callable[[Change], str]) -> Iterator[str]:
    """Where nothing fits: the changes that would, each with what it needs. option: a change as it is typed."""
    every = [f"{option(c)} ({rounded_up(c.memory)} GiB)" for c in plan.changes if c.name != "all of these"]
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


def option(change: Change) -> str:
    """A change as ``python -m memkern plan`` takes it."""
    if change.name == "clip":
        return "without --clip"
    return f"--{change.name.replace('_', '-')} {change.value}"


def code(plan: Plan) -> str:
    """A training loop with the techniques of the recommended step, else of the smallest."""
    t = (plan.recommended or plan.together).techniques
    body = [f"batch = next(batches)  # {t.micro_batch} {_sample(plan)}{'s' * (t.micro_batch > 1)}"]
    loss = _loss_lines(t, plan.loss)
    if t.precision == "amp":
        loss = [f'with torch.autocast("{plan.device}", torch.bfloat16):', *_indented(loss)]
    body += loss
    if t.accumulation > 1:
        body.append(f"(loss / {t.accumulation}).backward()")
        body = [f"for _ in range({t.accumulation}):", *_indented(body)]
    else:
        body.append("loss.backward()" + ("  # takes the steps" if t.step_in_backward else ""))
    body += ["optimizer.step()", "optimizer.zero_grad()"]
    set_up = ["import torch, memkern", "", *_model_lines(t), _optimizer_line(t)]
    return "\n".join([*set_up, "for step in range(steps):", *_indented(body)])


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _model_lines(t: Techniques) -> Iterator[str]:
    if t.precision == "bf16":
        yield "model.to(torch.bfloat16)"
    bits, share = t.activation_bits, t.linear_share
    options = [repr(bits) if bits else repr("recompute" if t.saved_bits else None)]
    options += [f"linear={share:g}"] if share is not None else []
    options += [f"saved_bits={t.saved_bits!r}"] if t.saved_bits else []
    if bits or t.saved_bits or share is not None:
        yield f"memkern.compress(model, {', '.join(options)})"
    if t.checkpointing != "none":
        yield f'memkern.planner.checkpoint_blocks(model, "{t.checkpointing}")'
    if t.loss_chunk:
        yield (
            "loss_fn = memkern.nn.LinearCrossEntropy.from_linear("
            f"model.get_output_embeddings(), chunk_size={t.loss_chunk})"
        )


def _optimizer_line(t: Techniques) -> str:
    options = ", ".join(["lr=lr", *(f"{name}={value!r}" for name, value in t.optimizer_options.items())])
    if t.is_torch:
        return f"optimizer = torch.optim.{t.optimizer_class}(model.parameters(), {options})"
    options += f", state_bits={t.state_bits}"
    options += f', master_weights="{t.master_weights}"' if t.master_weights and not t.host_copies else ""
    name = f"memkern.optim.{t.optimizer_class}"
    if t.step_in_backward:
        return f"optimizer = memkern.optim.StepInBackward({name}, model.parameters(), {options})"
    if t.offload:
        options += ", offload_gradients=True" + ("" if t.host_copies else ", host_dtype=None")
        return f"optimizer = memkern.optim.HostOffload({name}, model.parameters(), {options})"
    return f"optimizer = {name}(model.parameters(), {options})"


def _loss_lines(t: Techniques, loss: str) -> list[str]:
    if not t.loss_chunk:
        return [f"loss = {loss}"]
    return [
        'hidden = model.base_model(batch["input_ids"]).last_hidden_state',
        'loss = loss_fn(hidden[:, :-1], batch["labels"][:, 1:])',
    ]


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
