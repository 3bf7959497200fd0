"""What models save for their backward pass, by model, precision, length and mode.

Models of transformers and timm with random weights (zoo.py), one sequence or a few images. Saved: bytes
alive with the graph after the forward pass; peak: of the whole step without the optimizer, parameters and gradients
included. Both are counted over all storages that operators return. Gradients are compared with those of torch's mode:
the median over parameter tensors of the relative error, and the cosine of all gradients together; tensors whose
gradient is zero but for rounding (the bias of keys) are left out of the median.
"""

from __future__ import annotations

import contextlib
import csv
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import memkern
from benchmarks import RESULTS, report
from lab.studies import study
from memkern.memory import LiveBytes
from tests.support import zoo

PRECISIONS = ("fp32", "bf16 autocast", "bf16")
TOKENS = (512, 2048)
FIGURES = ("saved_per_token", "share", "peak_per_token", "peak_share", "gradient_error", "cosine")
COLUMNS = (*report.PROVENANCE, "transformers", "model", "precision", "tokens", "mode", *FIGURES)


def _checkpointed(model: Any) -> None:
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise NotImplementedError("the net has no gradient_checkpointing_enable")
    model.gradient_checkpointing_enable({"use_reentrant": False})


MODES: dict[str, Callable[[nn.Module], object]] = {
    "torch": lambda model: None,
    "checkpointing": _checkpointed,
    "compress": memkern.compress,
    "exact": lambda model: memkern.compress(model, saved_bits="exact"),
    "8": lambda model: memkern.compress(model, saved_bits=8),
}
Gradients = dict[str, Tensor]


def built(name: str, precision: str, tokens: int) -> tuple[nn.Module, Any, Any]:
    """A model, its batch and the autocast of its forward pass."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16 autocast" else contextlib.nullcontext()
    return zoo.build(name, tokens).to(dtype), zoo.batch(name, tokens, dtype), autocast


def step(name: str, precision: str, tokens: int, mode: str) -> tuple[int, int, Gradients]:
    """Saved bytes, peak bytes and gradients of one step."""
    model, batch, autocast = built(name, precision, tokens)
    MODES[mode](model)
    live = LiveBytes([*model.parameters(), *model.buffers(), *zoo.tensors(batch)])
    before = live.live
    with live:
        with autocast:
            loss = model(**batch).loss
        gc.collect()
        saved = live.live - before
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return saved, live.peak, gradients


def compared(actual: Gradients, expected: Gradients) -> tuple[float, float]:
    """The median relative error, and the cosine."""
    total = sum(float(g.double().square().sum()) for g in expected.values()) ** 0.5
    errors, dot, norm = [], 0.0, 0.0
    for name, g in expected.items():
        a, b = actual[name].double(), g.double()
        dot, norm = dot + float((a * b).sum()), norm + float(a.square().sum())
        if float(b.norm()) > 1e-5 * total:
            errors.append(float((a - b).norm() / b.norm()))
    return sorted(errors)[len(errors) // 2], dot / (total * norm**0.5) if norm else 0.0


def rows(models: list[str], precisions: list[str], lengths: list[int], modes: list[str]) -> Iterator[dict[str, str]]:
    provenance = study.provenance_with_transformers()
    for tokens in lengths:
        for name in models:
            for precision in precisions:
                saved0, peak0, expected = plain = step(name, precision, tokens, "torch")
                for mode in modes:
                    try:
                        saved, peak, actual = plain if mode == "torch" else step(name, precision, tokens, mode)
                    except (ValueError, NotImplementedError) as error:
                        print(f"{name}, {precision}, {tokens} tokens, {mode}: {error}")
                        continue
                    median, cosine = compared(actual, expected)
                    figures = (
                        f"{saved / tokens:.0f}",
                        f"{saved / saved0:.4f}",
                        f"{peak / tokens:.0f}",
                        f"{peak / peak0:.4f}",
                        f"{median:.2e}",
                        f"{cosine:.6f}",
                    )
                    case = dict(
                        zip(
                            ("model", "precision", "tokens", "mode"),
                            (name, precision, str(tokens), mode),
                            strict=True,
                        )
                    )
                    yield provenance | case | dict(zip(FIGURES, figures, strict=True))


_SHOWN = (
    ("fp32: torch, B/token", "fp32", "512", "torch", "saved_per_token"),
    ("exact", "fp32", "512", "exact", "share"),
    ("8 bits", "fp32", "512", "8", "share"),
    ("autocast: torch, B/token", "bf16 autocast", "512", "torch", "saved_per_token"),
    ("checkpointing", "bf16 autocast", "512", "checkpointing", "share"),
    ("exact", "bf16 autocast", "512", "exact", "share"),
    ("8 bits", "bf16 autocast", "512", "8", "share"),
    ("gradient error", "bf16 autocast", "512", "8", "gradient_error"),
    ("2,048 tokens: exact", "bf16 autocast", "2048", "exact", "share"),
    ("8 bits", "bf16 autocast", "2048", "8", "share"),
)


def _cell(row: dict[str, str] | None, column: str) -> str:
    if row is None:
        return ""
    value = float(row[column])
    if column == "saved_per_token":
        return f"{value:,.0f}"
    return f"{value:.3f}" if column == "share" else f"{100 * value:.1f} %"


def table(path: Path) -> str:
    """The table of docs/saved-tensors.md, of each case's last run."""
    with path.open(newline="") as file:
        last = {tuple(row[c] for c in COLUMNS[-10:-6]): row for row in csv.DictReader(file)}
    lines = ["| | " + " | ".join(shown[0] for shown in _SHOWN) + " |", "|---|" + "---:|" * len(_SHOWN)]
    for name in zoo.NAMES:
        cells = [_cell(last.get((name, *case)), column) for _, *case, column in _SHOWN]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("saved_models", __doc__, RESULTS)
    parser.add_argument("--models", nargs="+", choices=zoo.NAMES, default=list(zoo.NAMES))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--tokens", nargs="+", type=int, choices=TOKENS, default=list(TOKENS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--table", action="store_true", help="measure nothing, print the table of the docs")
    args = parser.parse_args(argv)
    path = args.out / "saved-models.csv"
    if args.table:
        print(table(path))
        return
    for row in rows(args.models, args.precisions, args.tokens, args.modes):
        report.append(path, [row], COLUMNS)
        case = f"{row['model']:<10} {row['precision']:<13} {row['tokens']:>5} {row['mode']:<13}"
        print(case, *(f"{name} {row[name]}" for name in FIGURES), flush=True)
    print(path)


if __name__ == "__main__":
    main()
