"""Counts what compiled models save for backward, by torch's partitioner and by memkern's, exact and in 8 bits.

Whole models of zoo.py with their losses, on one sequence or some images, run under torch.compile with Inductor's
decompositions and without its code generation. Saved bytes are the storages that the compiled graph's node holds, and
the loss; not parameters, buffers, inputs, nor the logits, which the graph returns and nothing needs. share is their
ratio to the bytes that eager torch saves. gradient_error is the relative error of a parameter's gradient against eager
torch, the median over parameters.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import RESULTS, report
from lab.studies import study
from memkern.memory import LiveBytes
from tests.support import zoo
from tests.support.partitioned import backend

PRECISIONS = ("fp32", "bf16 autocast", "bf16")
Gradients = dict[str, Tensor]
MODES: dict[str, int | str | None] = {"compiled": None, "exact": "exact", "8": 8}
MODELS = zoo.NAMES
COLUMNS = (
    *report.PROVENANCE,
    "transformers",
    "model",
    "precision",
    "tokens",
    "mode",
    "saved_per_token",
    "share",
    "gradient_error",
)


def built(name: str, precision: str, tokens: int) -> tuple[nn.Module, Any, Any]:
    """A model, its batch and the autocast of its forward pass."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16 autocast" else contextlib.nullcontext()
    return zoo.build(name, tokens).to(dtype), zoo.batch(name, tokens, dtype), autocast


def plain_step(name: str, precision: str, tokens: int) -> tuple[int, Gradients]:
    """The bytes that the graph keeps alive, and the gradients, without torch.compile."""
    model, batch, autocast = built(name, precision, tokens)
    live = LiveBytes([*model.parameters(), *model.buffers(), *zoo.tensors(batch)])
    before = live.live
    with live, autocast:
        loss = model(**batch).loss
    gc.collect()
    count = live.live - before
    loss.backward()
    return count, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def error_and_cosine(actual: Gradients, expected: Gradients) -> tuple[float, float]:
    """The median relative error over tensors, and the cosine of all gradients."""
    total = sum(float(g.double().square().sum()) for g in expected.values()) ** 0.5
    errors, dot, norm = [], 0.0, 0.0
    for name, g in expected.items():
        a, b = actual[name].double(), g.double()
        dot, norm = dot + float((a * b).sum()), norm + float(a.square().sum())
        if float(b.norm()) > 1e-5 * total:  # smaller gradients are rounding errors
            errors.append(float((a - b).norm() / b.norm()))
    return sorted(errors)[len(errors) // 2], dot / (total * norm**0.5) if norm else 0.0


def _held(node: Any) -> Iterator[Tensor]:
    """The tensors that a node of autograd's graph holds: those that a compiled function or an operation has saved."""
    names = ["saved_tensors"] if hasattr(node, "saved_tensors") else [a for a in dir(node) if a.startswith("_saved_")]
    for name in names:
        held = getattr(node, name)
        for x in held if isinstance(held, (tuple, list)) else (held,):
            if isinstance(x, Tensor):
                yield x


def saved(outputs: list[Tensor]) -> dict[int, int]:
    """The bytes of the storages of some outputs, and of all that their graph has saved, by storage."""
    sizes = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in outputs}
    nodes, seen = [x.grad_fn for x in outputs], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [source for source, _ in node.next_functions]
        for x in _held(node):
            sizes[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
    return sizes


def compiled_step(name: str, precision: str, tokens: int, bits: int | str | None) -> tuple[int, Gradients]:
    """The saved bytes, and the gradients."""
    torch._dynamo.reset()
    model, batch, autocast = built(name, precision, tokens)
    own = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers(), *zoo.tensors(batch))}
    with autocast:
        loss = torch.compile(model, backend=backend(bits))(**batch).loss
    count = sum(size for storage, size in saved([loss]).items() if storage not in own)
    loss.backward()
    return count, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def rows(names: list[str], precisions: list[str], tokens: int) -> Iterator[dict[str, str]]:
    provenance = study.provenance_with_transformers()
    for name in names:
        for precision in precisions:
            plain_count, expected = plain_step(name, precision, tokens)
            for mode, bits in MODES.items():
                count, gradients = compiled_step(name, precision, tokens, bits)
                error, _ = error_and_cosine(gradients, expected)
                values = (
                    name,
                    precision,
                    str(tokens),
                    mode,
                    str(count // tokens),
                    f"{count / plain_count:.4f}",
                    f"{error:.2e}",
                )
                yield study.row(provenance, COLUMNS, values)


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("saved_compiled", __doc__, RESULTS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    path = args.out / "saved-compiled.csv"
    study.write(path, rows(args.models, args.precisions, args.tokens), COLUMNS, shown=7)


if __name__ == "__main__":
    main()
