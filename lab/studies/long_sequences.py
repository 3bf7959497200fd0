"""Long sequences: what checkpoints store on the device, in codes and on the host, and the longest sequence that fits.

``bytes`` runs 8B models forward and backward on fake CUDA tensors: bf16 weights with 8-bit errors, a step in backward,
the loss in chunks, one sequence. saved_per_token: bytes on the device between the two passes; formula_per_token: what
the inputs of the checkpoints take, 2 bytes or 1 + 4 / 128 for an element; step_gib: the most that a step allocates
(saved tensors, temporaries, gradients); host_per_token: what is on the host. hidden_from: tokens from which a forward
pass's arithmetic takes as long as its transfers, by the planner's estimate for 400 TFLOP/s and PCIe 5.0 x16;
transfer_share: the transfers' time over that of the matrix products, without attention's.
``longest``: the planner's longest sequence for a device's memory, a multiple of 1,024 from 8,192 on, with 8-bit
states. Where weights, errors and states alone are too large, the states are on the host. ``error``: of all gradients
together, of models with the same modules and width 512 at 2,048 tokens, checkpoints in codes beside checkpoints.
``host``: processor time that a tensor adds which leaves and comes back, without what a driver takes for its transfers.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import itertools
import pickle
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import memkern
from benchmarks import report
from lab.studies import study
from memkern.options import Techniques
from memkern.planner import fake_cuda
from memkern.planner.hardware import DEFAULTS, LINKS
from memkern.planner.models import resolve
from memkern.planner.prediction import ALLOCATED_BY_A_STEP, BAND, Prediction, Predictor
from memkern.saved import link, offload
from memkern.saved.copies import Copies
from tests.support import zoo

from . import saved_models

GIB = 2**30
MODELS = {"qwen3-8b": "Qwen3", "llama-3.1-8b": "Llama"}
"""The planner's name, and that of the small model."""
TOKENS = (8192, 32768, 131072)
MEMORY = (24, 48, 80)
STEP = 1024
MOST = 2**22
WAYS: dict[str, dict[str, Any]] = {
    "checkpoints": {},
    "checkpoints in codes": {"saved_bits": 8, "checkpoint_bits": 8},
    "checkpoints on the host": {"saved_bits": "exact", "offload_saved": True},
    "checkpoints in codes on the host": {"saved_bits": 8, "offload_saved": True, "checkpoint_bits": 8},
    "codes on the host": {"checkpointing": None, "saved_bits": 8, "offload_saved": True},
}
COMMON: dict[str, Any] = {
    "precision": "bf16",
    "master_weights": "bf16+8",
    "state_bits": 8,
    "step_in_backward": True,
    "loss_chunk": 4096,
    "checkpointing": "blocks",
}
ACCELERATOR = dataclasses.replace(DEFAULTS["cuda"], half_flops=400e12, link=LINKS["pcie5"])
FIGURES = (
    *("saved_per_token", "formula_per_token", "step_gib", "saved_at_peak_gib", "host_per_token"),
    *("hidden_from", "transfer_share", "memory_gib", "peak_gib", "host_gib", "error", "host_us"),
)
COLUMNS = (*report.PROVENANCE, "transformers", "part", "model", "way", "states", "tokens", *FIGURES)
Row = dict[str, str]


def _predictor(model: str, tokens: int) -> Predictor:
    source: Any = resolve(model, 1, None, None, None)
    source.config.max_position_embeddings = max(tokens, source.config.max_position_embeddings)
    source.seq_len = tokens
    return Predictor(source, "cuda", "cuda", ACCELERATOR)


def bytes_of(model: str, way: str) -> list[Row]:
    """The rows of ``bytes``. Call with fake CUDA."""
    techniques = Techniques(**COMMON | WAYS[way])
    of_an_element = 1 + 4 / 128 if techniques.saved_bits == 8 else 2
    rows = []
    for tokens in TOKENS:
        predictor = _predictor(model, tokens)
        found = predictor.predict(techniques)
        traces, more = predictor.traces(techniques)
        saved = traces[0].saved + more * (traces[-1].saved - traces[0].saved)
        config = predictor.source.config
        formula = of_an_element * config.num_hidden_layers * config.hidden_size
        row = {
            "tokens": str(tokens),
            "saved_per_token": f"{saved / tokens:.0f}",
            "formula_per_token": f"{formula:.0f}" if techniques.checkpointing else "",
            "step_gib": f"{sum(found.categories[name] for name in ALLOCATED_BY_A_STEP) / GIB:.2f}",
        }
        row["saved_at_peak_gib"] = f"{found.categories['saved activations'] / GIB:.2f}"
        if found.left:
            transfer = found.left / tokens / ACCELERATOR.link
            arithmetic = 2 * predictor.fixed(techniques).count / ACCELERATOR.half_flops
            row |= {
                "host_per_token": f"{found.left / tokens:.0f}",
                "hidden_from": str(found.hidden_from),
                "transfer_share": f"{transfer / arithmetic:.3f}",
            }
        rows.append(row)
    return rows


def longest(model: str, way: str) -> list[Row]:
    """The rows of ``longest``. Call with fake CUDA."""

    @functools.cache
    def predicted(blocks: int, techniques: Techniques) -> Prediction:
        return _predictor(model, STEP * blocks).predict(techniques)

    rows = []
    for memory in MEMORY:
        row = {"states": "on the host", "memory_gib": str(memory), "tokens": "0"}
        for states in ({}, {"step_in_backward": False, "offload": True}):
            techniques = Techniques(**COMMON | WAYS[way] | states)
            predict = functools.partial(predicted, techniques=techniques)
            if (found := _largest(predict, memory * GIB)) is not None:
                blocks, p = found
                row |= {
                    "states": "on the host" if states else "on the device",
                    "tokens": str(STEP * blocks),
                    "peak_gib": f"{p.peak / GIB:.2f}",
                    "host_gib": f"{p.host / GIB:.2f}",
                }
                break
        rows.append(row)
    return rows


def _largest(predict: Any, memory: int) -> tuple[int, Prediction] | None:
    """The largest number of which the prediction, with the band of its error, fits. Peaks are nearly linear."""

    def peak(p: Prediction) -> float:
        return p.peak * (1 + BAND["cuda"][0])

    fits, best = 8, predict(8)
    if peak(best) > memory:
        return None
    fails, tried = MOST // STEP + 1, 32
    while fails - fits > 1:
        tried = min(max(tried, fits + 1), fails - 1)
        p = predict(tried)
        slope = (peak(p) - peak(best)) / (tried - fits)
        if peak(p) <= memory:
            fits, best = tried, p
        else:
            fails = tried
        tried = fits + int((memory - peak(best)) / slope)
    return fits, best


def error(model: str, precision: str, tokens: int = 2048) -> Row:
    """One row of ``error``."""

    def gradients(bits: int | None) -> dict[str, Tensor]:
        made: Any = zoo.build(MODELS[model], tokens)
        if bits:
            memkern.compress(made, activations=None, saved_bits=bits)
        memkern.checkpoint_blocks(made, bits=bits)
        autocast = torch.autocast("cpu", torch.bfloat16) if precision != "fp32" else contextlib.nullcontext()
        with autocast:
            loss = made(**zoo.batch(MODELS[model], tokens)).loss
        loss.backward()
        return {n: p.grad for n, p in made.named_parameters() if p.grad is not None}

    cosine = saved_models.compared(gradients(8), gradients(None))[1]
    return {"tokens": str(tokens), "error": f"{max(0.0, 2 - 2 * cosine) ** 0.5:.1e}"}


class NoCopies(Copies):
    """Transfers that cost nothing but the calls around them."""

    @staticmethod
    def _copy(pairs: Any) -> None:
        for _ in pairs:
            pass


def host_time(tensors: int = 400, rounds: int = 30) -> Row:
    """The row of ``host``."""
    device = torch.device("cpu")
    x = torch.randn(1024, requires_grad=True)

    def seconds(**options: Any) -> float:
        start = time.process_time()
        with memkern.quantize_saved("exact", **options):
            y = x
            for _ in range(tensors):
                y = y.cos()
        y.sum().backward()
        return time.process_time() - start

    before = link.LEAST_BYTES, dict(offload._links)
    link.LEAST_BYTES, offload._links[device] = 0, link.Link(device, NoCopies())
    try:
        more = [seconds(offload=True) - seconds() for _ in range(rounds)]
    finally:
        link.LEAST_BYTES = before[0]
        offload._links.clear()
        offload._links.update(before[1])
    return {"tokens": "", "host_us": f"{1e6 * statistics.median(more) / tensors:.1f}"}


def rows(parts: list[str], models: list[str], ways: list[str]) -> Iterator[Row]:
    from lab.studies import long_sequences as own  # its functions can be pickled; those of __main__ cannot

    functions = {"bytes": own.bytes_of, "longest": own.longest}
    if "host" in parts:
        yield {"part": "host", "model": "", "way": "a tensor that leaves"} | host_time()
    for part, model in itertools.product((p for p in parts if p != "host"), models):
        if part == "error":
            for precision in ("fp32", "bf16 autocast"):
                row = error(model, precision)
                yield {"part": part, "model": model, "way": f"checkpoints in codes, {precision}"} | row
            continue
        for way in ways:
            found = fake_cuda.call(pickle.dumps((functions[part], {"model": model, "way": way})))
            yield from ({"part": part, "model": model, "way": way} | row for row in found)


def last(path: Path, part: str) -> dict[tuple[str, ...], Row]:
    """Each case's last row of a part, by model, way, and memory or tokens."""
    with path.open(newline="") as file:
        found = [row for row in csv.DictReader(file) if row["part"] == part]
    return {(row["model"], row["way"], row["memory_gib"] or row["tokens"]): row for row in found}


def bytes_table(path: Path) -> str:
    """What the docs show of ``bytes``: a line per model and way."""
    rows = last(path, "bytes")
    lengths = [f"{tokens:,} tokens: a step allocates" for tokens in TOKENS]
    heads = ["device, B/token", "host, B/token", "transfer", *lengths]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for model, way in itertools.product(MODELS, WAYS):
        row = rows[model, way, str(TOKENS[-1])]
        steps = [f"{float(rows[model, way, str(tokens)]['step_gib']):.1f}" for tokens in TOKENS]
        host = f"{int(row['host_per_token'] or 0):,}"
        share = f"{float(row['transfer_share'] or 0):.0%}"
        cells = [f"{int(row['saved_per_token']):,}", host, share, *steps]
        lines.append(f"| {model}, {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def longest_table(path: Path) -> str:
    """What the docs show of ``longest``: tokens, with a star where the states are on the host."""
    rows = last(path, "longest")
    lines = [
        "| | " + " | ".join(f"{memory} GiB" for memory in MEMORY) + " |",
        "|---|" + "---:|" * len(MEMORY),
    ]
    for model, way in itertools.product(MODELS, WAYS):
        found = [rows[model, way, str(memory)] for memory in MEMORY]
        cells = [f"{int(row['tokens']):,}{'*' * (row['states'] == 'on the host')}" for row in found]
        lines.append(f"| {model}, {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def errors(path: Path) -> str:
    """The smallest and the largest error, in percent."""
    found = sorted(100 * float(row["error"]) for row in last(path, "error").values())
    return f"{found[0]:.1f} to {found[-1]:.1f} %"


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("long_sequences", __doc__)
    parts = ("bytes", "longest", "error", "host")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--table", action="store_true", help="measure nothing, print the tables of the docs")
    args = parser.parse_args(argv)
    path = args.out / "long-sequences.csv"
    if args.table:
        print(bytes_table(path), longest_table(path), sep="\n\n")
        return
    torch.set_num_threads(1)
    provenance = study.provenance_with_transformers()
    for row in rows(args.parts, args.models, args.ways):
        report.append(path, [{**dict.fromkeys(COLUMNS, ""), **provenance, **row}], COLUMNS)
        print(*row.values(), flush=True)
    print(path)


if __name__ == "__main__":
    main()
