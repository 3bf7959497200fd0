"""What few-bit activations do to a byte-level GPT.

Gradients: a model is trained with exact activations, and then its gradient is computed in every mode on the same
batches; the error is that of all parameters' gradients together, relative to the exact one.

Losses: the model is trained from scratch, and the trained one is fine-tuned on another text, in each mode with three
seeds (of the data order and, from scratch, of the first weights). Noise is the standard deviation of the exact runs.

No hardware is measured.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import pydoc_data
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from benchmarks import machine, report
from benchmarks.plot import FAINT, GRID, OTHERS, OURS
from lab.studies import study
from memkern.train.model import GPT

COLUMNS = (
    *report.PROVENANCE,
    "phase",
    "mode",
    "seed",
    "steps",
    "tokens",
    "validation_loss",
    "gradient_error",
)
FINE_TUNED_ON = str(Path(pydoc_data.__file__).with_name("topics.py"))  # English; the rest of the library is code


@dataclasses.dataclass(frozen=True)
class Setting:
    layers: int = 3
    heads: int = 4
    width: int = 96
    seq_len: int = 64
    batch_size: int = 8
    steps: int = 300  # from scratch
    fine_steps: int = 150
    lr: float = 1e-3
    fine_lr: float = 3e-4
    seeds: int = 3
    eval_tokens: int = 32768
    gradient_batches: int = 8


def _ours(**options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import memkern.nn

        return memkern.nn.GELU("tanh", **options)

    return make


MODES: dict[str, Callable[[], nn.Module]] = {
    "exact": lambda: nn.GELU("tanh"),
    "output": _ours(keep="output"),
    "4 bits": _ours(bits=4),
    "3 bits": _ours(bits=3),
    "2 bits": _ours(bits=2),
    "1 bit": _ours(bits=1),
}
TRAINED = ("exact", "4 bits", "3 bits")
FINE_TUNED = ("exact", "output", "4 bits", "3 bits", "2 bits")


def build(setting: Setting, seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(layers=setting.layers, heads=setting.heads, width=setting.width, seq_len=setting.seq_len)


def use(model: GPT, mode: str) -> GPT:
    """The model with the activations of a mode."""
    for block in model.blocks:
        mlp: Any = block.mlp
        mlp.act = MODES[mode]()
    return model


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train(model: nn.Module, text: torch.Tensor, setting: Setting, steps: int, lr: float, seed: int) -> None:
    """AdamW, a warm-up over a tenth of the steps, and a cosine to a tenth of the rate."""
    from memkern.train.data import step_batches

    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.1)
    for step in range(steps):
        progress = step / steps
        factor = min(1.0, 10 * progress + 1 / steps) * (0.55 + 0.45 * math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = lr * factor
        (batch,) = step_batches(
            text,
            seed=seed,
            step=step,
            accumulation=1,
            micro_batch=setting.batch_size,
            seq_len=setting.seq_len,
        )
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def validation_loss(model: nn.Module, text: torch.Tensor, setting: Setting) -> float:
    from memkern.train.data import validation_batches

    batches = validation_batches(text, tokens=setting.eval_tokens, micro_batch=16, seq_len=setting.seq_len)
    losses = [(loss_of(model, batch).item(), batch[1].numel()) for batch in batches]
    return sum(loss * n for loss, n in losses) / sum(n for _, n in losses)


def gradient_errors(model: GPT, text: torch.Tensor, setting: Setting) -> dict[str, float]:
    """|gradient - exact gradient| / |exact gradient| over all parameters, the root mean square over batches."""
    from memkern.train.data import step_batches

    squares = dict.fromkeys(MODES, 0.0)
    for i in range(setting.gradient_batches):
        (batch,) = step_batches(
            text, seed=1000, step=i, accumulation=1, micro_batch=setting.batch_size, seq_len=setting.seq_len
        )
        gradients = {}
        for mode in MODES:
            parameters = list(use(model, mode).parameters())
            found = torch.autograd.grad(loss_of(model, batch), parameters)
            gradients[mode] = torch.cat([g.flatten() for g in found]).double()
        exact = gradients["exact"]
        for mode, gradient in gradients.items():
            squares[mode] += float(((gradient - exact).norm() / exact.norm()) ** 2)
    return {mode: math.sqrt(square / setting.gradient_batches) for mode, square in squares.items()}


def results(setting: Setting) -> Iterator[dict[str, str]]:
    from memkern.train.data import load_corpus
    from memkern.train.files import standard_library_files

    provenance = machine.provenance("cpu")
    library = [str(file) for file in standard_library_files() if str(file) != FINE_TUNED_ON]
    corpus = load_corpus(library, seq_len=setting.seq_len)
    other = load_corpus([FINE_TUNED_ON], seq_len=setting.seq_len)
    tokens = setting.batch_size * setting.seq_len

    def row(phase: str, mode: str, seed: int, steps: int, loss: float | None, error: float | None) -> dict[str, str]:
        values = (phase, mode, seed, steps, steps * tokens, loss, error)
        texts = ["" if v is None else f"{v:.5g}" if isinstance(v, float) else str(v) for v in values]
        return study.row(provenance, COLUMNS, texts)

    base = None
    for seed, mode in track([(s, m) for s in range(setting.seeds) for m in TRAINED], "from scratch", transient=True):
        model = use(build(setting, seed), mode)
        train(model, corpus.train, setting, setting.steps, setting.lr, seed)
        yield row("scratch", mode, seed, setting.steps, validation_loss(model, corpus.validation, setting), None)
        if base is None:
            base = model
    assert base is not None
    for mode, error in gradient_errors(base, corpus.validation, setting).items():
        yield row("gradient", mode, 0, setting.steps, None, error)
    before = validation_loss(base, other.validation, setting)
    yield row("before fine-tuning", "exact", 0, 0, before, None)
    for seed, mode in track([(s, m) for s in range(setting.seeds) for m in FINE_TUNED], "fine-tuning", transient=True):
        model = use(copy.deepcopy(base), mode)
        train(model, other.train, setting, setting.fine_steps, setting.fine_lr, seed)
        loss = validation_loss(model, other.validation, setting)
        yield row("fine-tuning", mode, seed, setting.fine_steps, loss, None)


def losses_of(rows: list[dict[str, str]], phase: str) -> dict[str, list[float]]:
    """The validation losses of a phase by mode, a number per seed."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["phase"] == phase:
            found.setdefault(row["mode"], []).append(float(row["validation_loss"]))
    return found


def spread(losses: list[float]) -> float:
    return statistics.stdev(losses) if len(losses) > 1 else 0.0


def table(rows: list[dict[str, str]]) -> Table:
    shown = Table(title="Few-bit GELU in a byte-level GPT", title_justify="left")
    for heading in ("", "gradient error", "loss from scratch", "loss fine-tuned"):
        shown.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    errors = {row["mode"]: row["gradient_error"] for row in rows if row["phase"] == "gradient"}
    phases = [losses_of(rows, phase) for phase in ("scratch", "fine-tuning")]
    for mode, error in errors.items():
        cells = [f"{statistics.mean(p[mode]):.4f} ± {spread(p[mode]):.4f}" if mode in p else "" for p in phases]
        shown.add_row(mode, error, *cells)
    return shown


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """Each run's loss minus the mean loss of the exact runs, and the gradient errors."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    for axis, phase in zip(axes, ("scratch", "fine-tuning"), strict=False):
        losses = losses_of(rows, phase)
        mean = statistics.mean(losses["exact"])
        noise = spread(losses["exact"])
        axis.axhspan(-noise, noise, color=GRID)
        for i, (mode, values) in enumerate(losses.items()):
            color = OTHERS if mode == "exact" else OURS
            axis.scatter([i] * len(values), [v - mean for v in values], color=color, s=24, zorder=3)
        axis.set_xticks(range(len(losses)), list(losses), fontsize=9)
        axis.set_title(f"{phase}: validation loss − exact mean ({mean:.3f})", fontsize=9, loc="left")
        axis.set_xlabel("band: one standard deviation of the exact runs", color=FAINT, fontsize=8)
    errors = {row["mode"]: float(row["gradient_error"]) for row in rows if row["phase"] == "gradient"}
    del errors["exact"]
    axes[2].bar(list(errors), list(errors.values()), color=OURS)
    axes[2].set_yscale("log")
    axes[2].tick_params(axis="x", labelsize=9)
    axes[2].set_title("relative error of the gradient", fontsize=9, loc="left")
    for axis in axes:
        axis.spines[:].set_visible(False)
        axis.grid(axis="y", color=GRID)
        axis.set_axisbelow(True)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def main(argv: list[str] | None = None, setting: Setting | None = None) -> None:
    parser = study.parser("activation_parity", __doc__)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # a small model: a second thread costs more than it brings
    rows = list(results(setting or Setting()))
    path = args.out / "activation-parity.csv"
    report.append(path, rows, COLUMNS)
    draw(rows, path.with_suffix(".png"))
    console = Console()
    console.print(table(rows))
    console.print(path)


if __name__ == "__main__":
    main()
