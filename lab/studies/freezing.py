"""What rounding does to quiet elements in training, and whether it matters there.

A byte-level GPT with a table of 4,096 hashed pairs of bytes beside its embedding, many of whose rows are rare, is
trained for 5,000 steps by AdamW8bit as it rounds today, with both moments rounded to the nearest, with the dynamic map,
and in fp32, on the same data. A row is quiet where its pairs have not occurred for 50 steps; sqrt(v) and |m| are means
over the elements of the quiet rows, which are the same in all runs. No hardware is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks import machine, report
from benchmarks.plot import FAINT, GRID, OTHERS, OURS
from lab.studies import study

from . import bf16_weights
from .bf16_weights import HEADS, LAYERS, SEQ_LEN, WIDTH
from .second_moment import Adam84

COLUMNS = (*report.PROVENANCE, "states", "step", "figure", "value")
ROWS = 4096
QUIET_STEPS = 50
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {"state_bits": 32},
    "8 bits, dithered": {},
    "8 bits, to the nearest": {},
    "8 bits, dynamic": {"codec": "dynamic"},
}
COLORS = {
    "fp32": "#212529",
    "8 bits, dithered": OURS,
    "8 bits, to the nearest": "#e8590c",
    "8 bits, dynamic": OTHERS,
}
FIGURES = ("sqrt(v) of quiet rows", "|m| of quiet rows", "validation loss")


def row_of(tokens: Tensor) -> Tensor:
    """The row of each pair of a byte and the one before it."""
    before = torch.nn.functional.pad(tokens, (1, 0))[:, :-1]
    return (before * 256 + tokens) * 40503 % 65536 // (65536 // ROWS)


class PairGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from memkern.train.model import GPT

        self.gpt = GPT(layers=LAYERS, heads=HEADS, width=WIDTH, seq_len=SEQ_LEN)
        self.pairs = nn.Embedding(ROWS, WIDTH)
        nn.init.normal_(self.pairs.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        gpt, T = self.gpt, tokens.shape[1]
        x = gpt.embedding(tokens) + gpt.position[:T] + self.pairs(row_of(tokens))
        for block in gpt.blocks:
            x = block(x)
        return nn.functional.linear(gpt.norm(x), gpt.embedding.weight)


class Nearest(Adam84):
    """AdamW whose moments go through 8-bit power codes, rounded to the nearest."""

    def _store(self, state: dict[str, Any], p: Tensor, step: int) -> None:
        import memkern

        for key, signed in (("m", True), ("w", False)):
            codes, scale = memkern.quantize_blockwise(state[key], codec="power", signed=signed, block_size=128)
            state[key] = memkern.dequantize_blockwise(codes, scale, codec="power", block_size=128)


def new_optimizer(name: str, params: Any) -> torch.optim.Optimizer:
    from memkern.optim import AdamW8bit

    options: dict[str, Any] = {"weight_decay": 0.1, **VARIANTS[name]}
    return (Nearest if name.endswith("to the nearest") else AdamW8bit)(params, **options)


def moments(optimizer: torch.optim.Optimizer, p: Tensor) -> tuple[Tensor, Tensor]:
    """|m| and sqrt(v) as they are stored."""
    from memkern.optim.state import load_moment

    state: Any = optimizer.state[p]
    if isinstance(optimizer, Nearest):
        return state["m"].abs(), state["w"]
    return load_moment("exp_avg", state).abs(), load_moment("exp_avg_sq", state).sqrt()


def run(name: str, steps: int, every: int, lr: float = 3e-3) -> Iterator[tuple[str, int, str, float]]:
    text = bf16_weights.corpus()
    torch.manual_seed(0)
    model = PairGPT()
    params = dict(model.named_parameters())
    of_run = bf16_weights.Run(model, params)
    optimizer = new_optimizer(name, params.values())
    last_seen = torch.full((ROWS,), -(10**9))
    for step, batch in enumerate(bf16_weights.batches(text.train, 0, 0, steps)):
        optimizer.param_groups[0]["lr"] = bf16_weights.schedule(lr, step, steps)
        optimizer.zero_grad()
        of_run.loss(batch).backward()
        optimizer.step()
        last_seen[row_of(batch[0]).flatten()] = step
        if (step + 1) % every:
            continue
        quiet = (last_seen < step - QUIET_STEPS) & (last_seen >= 0)
        m, w = moments(optimizer, params["pairs.weight"])
        values = (
            w[quiet].mean().item(),
            m[quiet].mean().item(),
            bf16_weights.validation_loss(of_run, text.validation),
        )
        for figure, value in zip(FIGURES, values, strict=True):
            yield name, step + 1, figure, value


def draw(rows: list[dict[str, str]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(FIGURES), figsize=(12, 3.4), layout="constrained")
    for axis, shown in zip(axes, FIGURES, strict=True):
        for name, color in COLORS.items():
            points = [(int(r["step"]), float(r["value"])) for r in rows if r["states"] == name and r["figure"] == shown]
            if points:
                axis.plot(*zip(*points, strict=True), label=name, color=color)
        axis.set_title(shown, fontsize=10, loc="left")
        axis.set_xlabel("step", color=FAINT)
        if shown != "validation loss":
            axis.set_yscale("log")
        axis.spines[:].set_visible(False)
        axis.grid(color=GRID)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("freezing", __doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--every", type=int, default=250, help="steps from one look to the next")
    parser.add_argument("--only", choices=VARIANTS, help="one of the runs; without it all, and the picture")
    args = parser.parse_args(argv)
    provenance, console = machine.provenance("cpu"), Console()
    path = args.out / "freezing.csv"
    for name in [args.only] if args.only else VARIANTS:
        for figure in run(name, args.steps, args.every):
            text = [f"{x:.5g}" if isinstance(x, float) else str(x) for x in figure]
            report.append(path, [study.row(provenance, COLUMNS, text)], COLUMNS)
            console.print(*text, sep=" | ", highlight=False)
    import csv

    with path.open(newline="") as file:
        draw([*csv.DictReader(file)], path.with_suffix(".png"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
