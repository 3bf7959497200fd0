"""What a compiled model saves for its backward pass: the partitioner recomputes elementwise functions by itself.

Models of zoo.py, one sequence, the whole model and its loss under torch.compile. The backend is
aot_eager_decomp_partition: the decompositions and the partitioner of Inductor, without its code generation. Saved: the
storages that the compiled graph's node holds, logits and loss included, parameters, buffers and inputs not; its share
is of what torch saves without torch.compile (saved-models.csv, where "exact" and 8 bits are).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from lab.studies import study
from tests.support import zoo

from .saved_models import step

BACKEND = "aot_eager_decomp_partition"
MODELS = ("GPT-2", "BERT", "ViT", "Llama", "Mixtral")
PRECISIONS = ("fp32", "bf16 autocast")
COLUMNS = (
    *report.PROVENANCE,
    "transformers",
    "model",
    "precision",
    "tokens",
    "backend",
    "saved_per_token",
    "share",
)


def _held(node: Any) -> Iterator[Tensor]:
    """What a node holds: a compiled function's saved tensors, or those that an operation of torch has saved."""
    names = (
        ["saved_tensors"]
        if hasattr(node, "saved_tensors")
        else [a for a in dir(node) if a.startswith("_saved_")]
    )
    for name in names:
        found = getattr(node, name)
        for x in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(x, Tensor):
                yield x


def saved(outputs: list[Tensor]) -> dict[int, int]:
    """Bytes by storage of all that is saved above some outputs, and of these."""
    found = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in outputs}
    nodes, seen = [x.grad_fn for x in outputs], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [source for source, _ in node.next_functions]
        for x in _held(node):
            found[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
    return found


def bytes_saved(name: str, precision: str, tokens: int) -> int:
    torch._dynamo.reset()
    model, batch = zoo.build(name, tokens), zoo.batch(name, tokens)
    own = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers(), *zoo.tensors(batch))}
    autocast = (
        torch.autocast("cpu", torch.bfloat16) if precision == "bf16 autocast" else contextlib.nullcontext()
    )
    with autocast:
        out = torch.compile(model, backend=BACKEND)(**batch)
    return sum(size for storage, size in saved([out.loss, out.logits]).items() if storage not in own)


def rows(names: list[str], tokens: int) -> Iterator[dict[str, str]]:
    provenance = study.provenance_with_transformers()
    for name in names:
        for precision in PRECISIONS:
            count = bytes_saved(name, precision, tokens)
            of = step(name, precision, tokens, "torch")[0]
            values = (name, precision, str(tokens), BACKEND, str(count // tokens), f"{count / of:.4f}")
            yield study.row(provenance, COLUMNS, values)


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("saved_compiled", __doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    path = args.out / "saved-compiled.csv"
    study.write(path, rows(args.models, args.tokens), COLUMNS, shown=6)


if __name__ == "__main__":
    main()
