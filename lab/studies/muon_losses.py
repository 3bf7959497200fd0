"""python -m lab.studies.muon_losses PART: what 8 bits of momentum cost Muon, on a byte-level GPT.

torch's and memkern's Muon and AdamW, with momentum in 32 and in 8 bits, and in 8 bits to the nearest code. Each trains
1,000 steps at four learning rates with one seed, and at the best of them with two more. ``small`` and ``large`` are the
sizes of the model. The picture beside the results has all runs in it. No hardware is measured.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import report
from benchmarks.plot import FAINT, FLOOR, GRID, OTHERS, OURS

from . import bf16_weights

COLUMNS = (*report.PROVENANCE, "part", "optimizer", "lr", "seed", "steps", "figure", "value")
SIZES = {"small": (2, 2, 64), "large": (3, 4, 128)}  # layers, heads, width
RATES = {"muon": (0.005, 0.01, 0.02, 0.04), "adamw": (1e-3, 2e-3, 4e-3, 8e-3)}
ADAMW_LR = 3e-3  # of what Muon leaves to AdamW
SEQ_LEN, BATCH = 64, 8


class Nearest:
    """Muon with fp32 momentum, which is replaced after each step by its 8-bit codes' values, to the nearest."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.inner = _muon(model, lr, state_bits=32)
        self.param_groups = self.inner.param_groups

    def step(self) -> None:
        from memkern.quant.blockwise import dequantize_blockwise, quantize_blockwise

        self.inner.step()
        for state in self.inner.state.values():
            if "momentum_buffer" in state and state["momentum_buffer"].numel() >= 4096:
                codes, scale = quantize_blockwise(state["momentum_buffer"], codec="power", block_size=128)
                state["momentum_buffer"].copy_(dequantize_blockwise(codes, scale, codec="power", block_size=128))


class TorchMuon:
    """torch.optim.Muon for the matrices and torch.optim.AdamW for the others."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        groups = _groups(model, lr)
        of = {name: [g for g in groups if g["algorithm"] == name] for name in ("muon", "adamw")}
        self.inner = [
            torch.optim.Muon([p for g in of["muon"] for p in g["params"]], lr=lr, weight_decay=0.1),
            torch.optim.AdamW([{k: v for k, v in g.items() if k != "algorithm"} for g in of["adamw"]]),
        ]
        self.param_groups = [group for optimizer in self.inner for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.inner:
            optimizer.step()


def _groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    from memkern.optim import muon_groups

    return [*muon_groups(model, lr=lr, adamw_lr=ADAMW_LR)]


def _muon(model: nn.Module, lr: float, **options: Any) -> Any:
    from memkern.optim import Muon8bit

    return Muon8bit(_groups(model, lr), **options)


def _adamw(model: nn.Module, lr: float, name: str) -> Any:
    from memkern import optim

    cls = getattr(torch.optim, name, None) or getattr(optim, name)
    return cls(optim.param_groups(model, weight_decay=0.1), lr=lr)


OPTIMIZERS: dict[str, tuple[str, Callable[[nn.Module, float], Any]]] = {
    "torch.optim.Muon": ("muon", TorchMuon),
    "Muon8bit": ("muon", _muon),
    "Muon, 8 bits to the nearest": ("muon", Nearest),
    "torch.optim.AdamW": ("adamw", lambda model, lr: _adamw(model, lr, "AdamW")),
    "AdamW8bit": ("adamw", lambda model, lr: _adamw(model, lr, "AdamW8bit")),
}

STYLES = {  # color and marker
    "torch.optim.Muon": (OTHERS, "o"),
    "Muon8bit": (OURS, "x"),
    "Muon, 8 bits to the nearest": (FLOOR, "+"),
    "torch.optim.AdamW": (FAINT, "s"),
    "AdamW8bit": (OURS, "d"),
}

Figure = tuple[str, float, int, int, str, float]


def validation_loss(
    size: str, new: Callable[[nn.Module, float], Any], text: Any, lr: float, seed: int, steps: int
) -> float:
    """After training at ``lr``, with the schedule of bf16_weights."""
    from memkern.train.data import step_batches, validation_batches
    from memkern.train.model import GPT

    torch.manual_seed(seed)
    layers, heads, width = SIZES[size]
    model = GPT(layers=layers, heads=heads, width=width, seq_len=SEQ_LEN)
    optimizer = new(model, lr)
    rates = [group["lr"] for group in optimizer.param_groups]

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = bf16_weights.schedule(rate, step, steps)
        (batch,) = step_batches(text.train, seed=seed, step=step, accumulation=1, micro_batch=BATCH, seq_len=SEQ_LEN)
        for p in model.parameters():
            p.grad = None
        loss_of(*batch).backward()
        optimizer.step()
    with torch.no_grad():
        found = validation_batches(text.validation, tokens=65536, micro_batch=64, seq_len=SEQ_LEN)
        return statistics.fmean(float(loss_of(*batch)) for batch in found)


def losses(
    size: str, steps: int = 1000, seeds: Sequence[int] = (0, 1, 2), names: Iterable[str] = tuple(OPTIMIZERS)
) -> Iterator[Figure]:
    """Four rates with the first seed; the others at the best of them."""
    from memkern.train import load_corpus

    text = load_corpus((), seq_len=SEQ_LEN)
    for name in names:
        kind, new = OPTIMIZERS[name]
        found = {}
        for lr in RATES[kind]:
            loss = validation_loss(size, new, text, lr, seeds[0], steps)
            found[lr] = loss if math.isfinite(loss) else math.inf
            yield name, lr, seeds[0], steps, "validation loss", found[lr]
        best = min(found, key=lambda lr: found[lr])
        for seed in seeds[1:]:
            yield (
                name,
                best,
                seed,
                steps,
                "validation loss",
                validation_loss(size, new, text, best, seed, steps),
            )


PARTS: dict[str, Callable[[], Iterator[Figure]]] = {
    "small": lambda: losses("small"),
    "large": lambda: losses("large"),
}


def draw(path: Path) -> None:
    """All runs of a results file, into a PNG beside it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if float(row["value"]) < math.inf]
    sizes = [size for size in SIZES if any(row["part"] == size for row in rows)]
    figure, axes = plt.subplots(1, len(sizes), figsize=(5 * len(sizes) + 1, 3.4), squeeze=False, layout="constrained")
    for axis, size in zip(axes.flat, sizes, strict=True):
        for name, (color, marker) in STYLES.items():
            points = [(float(r["lr"]), float(r["value"])) for r in rows if (r["part"], r["optimizer"]) == (size, name)]
            if points:
                axis.plot(*zip(*points, strict=True), marker, label=name, color=color, fillstyle="none")
        layers, _, width = SIZES[size]
        axis.set_title(f"{layers} layers of width {width}", fontsize=10, loc="left")
        axis.set_xlabel("learning rate", color=FAINT)
        axis.set_xscale("log")
        axis.spines[:].set_visible(False)
        axis.grid(color=GRID)
    axes.flat[0].set_ylabel("validation loss, nats per byte", color=FAINT)
    axes.flat[0].legend(frameon=False, fontsize=8)
    figure.savefig(path.with_suffix(".png"), dpi=140)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    draw(bf16_weights.run_part("muon_losses", __doc__, PARTS, COLUMNS, argv))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
