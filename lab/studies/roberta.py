"""RoBERTa-base's memory, few-bit and randomized, beside published figures.

Fine-tuning on MRPC, batch 128, fp32, eager attention, AdamW: the peak of a whole step, counted on fake CUDA tensors
(every storage from the operator that allocates it until it is freed), so that no GPU and no weights are needed.
Gradients stay allocated between steps, as in the torch version of the published runs. 103 tokens are the longest padded
batch. The published implementation stored 4 bits per element where it says 3, so it is compared with 4 bits; memkern's
3 bits are shown too.

Published: the figures of fewbit's authors (Novikov et al., arXiv 2202.00441; Bershatsky et al., arXiv 2201.13195).
"""

from __future__ import annotations

from . import fakecuda  # noqa: F401  (before torch)

# isort: split
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import memkern
from benchmarks import machine, report
from memkern import memory

from . import study

BATCH, TOKENS = 128, 103
GIB = 2**30
COLUMNS = (
    *report.PROVENANCE, "transformers", "gelu", "bits", "linear_keep", "peak_gib", "saving_percent",
    "published_gib", "published_saving_percent",
)  # fmt: skip


class Row(NamedTuple):
    gelu: str
    bits: int | None
    linear: float | None
    published: tuple[str, str] = ("", "")  # GiB, saving in percent


ROWS = (
    Row("torch", None, None, ("11.30", "0")),
    Row("as published", 4, None, ("9.75", "13.8")),
    Row("torch", None, 0.2, ("9.20", "18.6")),
    Row("as published", 4, 0.2, ("7.60", "32.7")),
    Row("memkern", 3, None),
    Row("memkern", 3, 0.2),
)


def _model() -> Any:
    """RoBERTa-base with random weights: transformers' default configuration but for these sizes."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    sizes = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
    return RobertaForSequenceClassification(RobertaConfig(**sizes, attn_implementation="eager"))


def peak_bytes(bits: int | None, linear: float | None, batch: int = BATCH, tokens: int = TOKENS) -> int:
    """The peak of one training step after the first, parameters, gradients and optimizer states included."""
    mode = FakeTensorMode()
    with mode, torch.device("cuda"):
        model = _model().train()
    # Outside of the fake mode: modules make tensors of levels, which are no part of the peak.
    memkern.compress(model, bits, linear=linear)
    with mode, torch.device("cuda"):
        # foreach=False: torch's foreach step allocates temporaries as large as all parameters together.
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        ids, mask = torch.zeros(batch, tokens, dtype=torch.long), torch.ones(batch, tokens, dtype=torch.long)
        labels = torch.zeros(batch, dtype=torch.long)

        def step() -> None:
            model(ids, attention_mask=mask, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        step()
        return memory.peak_bytes(step, model, optimizer)


def results() -> Iterator[dict[str, str]]:
    import transformers

    provenance = machine.provenance("cpu") | {"transformers": transformers.__version__}
    baseline = 0.0
    for row in ROWS:
        peak = peak_bytes(row.bits, row.linear) / GIB
        baseline = baseline or peak
        saving = 100 * (1 - peak / baseline)
        values = (row.gelu, row.bits or "", row.linear or "", f"{peak:.3f}", f"{saving:.2f}", *row.published)
        yield study.row(provenance, COLUMNS, [*map(str, values)])


def lines(rows: list[dict[str, str]]) -> Iterator[str]:
    heads = ("GELU", "bits", "linear layers save", "GiB", "saving %", "published GiB", "saving %")
    table = [heads, *(tuple(row[name] for name in COLUMNS[-len(heads) :]) for row in rows)]
    widths = [max(len(cells[i]) for cells in table) for i in range(len(heads))]
    for cells in table:
        yield "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("roberta", __doc__)
    args = parser.parse_args(argv)
    rows = list(results())
    print(f"RoBERTa-base, batch {BATCH}, {TOKENS} tokens, fp32, eager attention: peak of a training step")
    print("\n".join(lines(rows)))
    path = args.out / "roberta.csv"
    report.append(path, rows, COLUMNS)
    print(path)


if __name__ == "__main__":
    main()
