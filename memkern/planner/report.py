"""A plan as a text, a picture, and lines of code."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from .planning import Plan
from .prediction import CATEGORIES, Prediction
from .techniques import Techniques

GIB = 2**30
HEADS = ("weights", "errors", "grads", "optim.", "saved", "temp.", "process")


def rows(plan: Plan) -> Iterator[tuple[str, Prediction]]:
    """Every prediction with its name."""
    yield from plan.alone.items()
    yield "all together", plan.together
    if plan.recommended is not None:
        yield "recommended", plan.recommended


def text(plan: Plan) -> str:
    above, below = plan.band
    base = next(iter(plan.alone.values())).seconds / next(iter(plan.alone.values())).techniques.micro_batch
    lines = [
        f"{plan.model}: {plan.parameters:,} parameters, {plan.seq_len} tokens, {plan.device}; "
        f"limit {plan.memory / GIB:.2f} GiB",
        f"peak of a step in GiB, one sequence; time against plain training; truth within -{below:.0%} and +{above:.0%} "
        f"(counted on {plan.counted_on})",
        "",
        f"{'':<32}{'peak':>8}{'time':>7}  " + "".join(f"{head:>9}" for head in HEADS),
    ]
    for name, p in rows(plan):
        cells = "".join(
            f"{p.categories[c] / GIB:>9.2f}" if p.categories[c] else f"{'-':>9}" for c in CATEGORIES
        )
        sequences = p.techniques.micro_batch * p.techniques.accumulation
        fits = " " if p.peak * (1 + above) <= plan.memory else "!"
        lines.append(f"{name:<32}{p.peak / GIB:>8.2f}{fits}{p.seconds / sequences / base:>5.2f}x  {cells}")
    lines += ["", *verdict(plan)]
    return "\n".join(lines)


def rounded_up(size: int) -> str:
    """GiB with two decimals, which are enough."""
    return f"{math.ceil(100 * size / GIB) / 100:.2f}"


def verdict(plan: Plan) -> Iterator[str]:
    p = plan.recommended
    if p is None:
        yield f"Does not fit: the least that could is {rounded_up(plan.least)} GiB, with {plan.together.techniques}."
        return
    yield f"Fits: {p.techniques}."
    yield f"Largest micro-batch with these: {plan.largest_micro_batch}."
    if p.host:
        yield f"On the host: {p.host / GIB:.2f} GiB."
    yield "In a loop of your own:"
    yield ""
    yield plan.code()


def code(plan: Plan) -> str:
    """A training loop with the techniques of the recommended step, else of the smallest."""
    t = (plan.recommended or plan.together).techniques
    body = [f"batch = next(batches)  # {t.micro_batch} sequences"]
    loss = _loss_lines(t)
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
    if t.optimizer.startswith("torch."):
        return f"optimizer = torch.optim.{t.optimizer.removeprefix('torch.')}(model.parameters(), lr=lr)"
    options = f"lr=lr, state_bits={t.state_bits}"
    options += f', master_weights="{t.master_weights}"' if t.master_weights and not t.host_copies else ""
    name = f"memkern.optim.{t.optimizer}"
    if t.step_in_backward:
        return f"optimizer = memkern.optim.StepInBackward({name}, model.parameters(), {options})"
    if t.offload:
        options += ", offload_gradients=True" + ("" if t.host_copies else ", host_dtype=None")
        return f"optimizer = memkern.optim.HostOffload({name}, model.parameters(), {options})"
    return f"optimizer = {name}(model.parameters(), {options})"


def _loss_lines(t: Techniques) -> list[str]:
    if not t.loss_chunk:
        return ["loss = model(**batch).loss"]
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
    axes.set_xlabel(f"GiB at the peak of a step, {plan.model}, {plan.seq_len} tokens, {plan.device}")
    axes.legend(fontsize="small", loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
