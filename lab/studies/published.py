"""How much each phase of a GPT's first training step adds, beside published figures.

12 layers of width 768, batch 8, 512 tokens, fp32, AdamW, counted on fake CUDA tensors (fake CPU ones without a C++
compiler). What is published is what the forward pass adds. Vocabulary, attention and dropout are not stated: here they
are GPT-2's vocabulary and dropout, and two kinds of attention.
"""

from __future__ import annotations

import importlib
import pickle
from typing import Any

from lab.studies import study

COLUMNS = (
    *(
        "techniques",
        "attention",
        "counted_on",
        "published_forward_mb",
        "forward_mb",
        "backward_mb",
        "step_mb",
    ),
    *("peak_mb", "published_ratio", "ratio"),
)
BATCH, TOKENS = 8, 512
FORWARD = {"none": "7202", "blocks": "1570"}
"""MB that the forward pass adds, by checkpointing."""
RATIOS = {"blocks": "0.394", "amp": "0.804"}
"""Peaks with a technique over peaks without: 3.71 by 9.42 GB and 6,691 by 8,325 MB, of models that are not named."""
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "blocks": {"checkpointing": "blocks"},
    "amp": {"precision": "bf16-mixed"},
}


def phases(attention: str, way: str, device: str, counted_on: str) -> dict[str, float]:
    """MB (10^6 bytes) that each phase of the first step adds, and the peak without the process."""
    from memkern.options import Techniques
    from memkern.planner.hardware import DEFAULTS
    from memkern.planner.models import resolve
    from memkern.planner.prediction import Predictor

    source: Any = resolve("gpt2", TOKENS, None, None, None)
    source.config._attn_implementation = attention
    predictor = Predictor(source, device, counted_on, DEFAULTS[device])
    techniques = Techniques(micro_batch=BATCH, **WAYS[way])
    traces, more = predictor.traces(techniques)
    saved = traces[0].saved + more * (traces[-1].saved - traces[0].saved)
    fixed, found = predictor.fixed(techniques), predictor.predict(techniques)
    sizes = {
        "forward_mb": saved,
        "backward_mb": fixed.gradients - saved,
        "step_mb": fixed.optimizer,
        "peak_mb": found.peak - found.categories["process and context"],
    }
    return {name: size / 1e6 for name, size in sizes.items()}


def counted(attention: str, way: str) -> tuple[str, dict[str, float]]:
    """The device that was counted on, and the figures."""
    from memkern.planner import fake_cuda

    arguments = {"attention": attention, "way": way, "device": "cuda"}
    if fake_cuda.compiler() is None:
        on = "cuda, on fake CPU tensors"
        return on, phases(**arguments, counted_on=on)
    here = importlib.import_module(__spec__.name)  # pickled by this name, and not as __main__'s
    return "cuda", fake_cuda.call(pickle.dumps((here.phases, arguments | {"counted_on": "cuda"})))


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("published", __doc__)
    args = parser.parse_args(argv)
    import transformers

    from benchmarks import machine, report

    provenance = machine.provenance("cpu") | {"transformers": transformers.__version__}
    rows = []
    for attention in ("eager", "sdpa"):
        plain = None
        for way in WAYS:
            on, found = counted(attention, way)
            plain = plain or found["peak_mb"]
            row = {
                "techniques": way,
                "attention": attention,
                "counted_on": on,
                "published_forward_mb": FORWARD.get(way, ""),
                **{name: f"{value:.0f}" for name, value in found.items()},
                "published_ratio": RATIOS.get(way, ""),
                "ratio": f"{found['peak_mb'] / plain:.3f}",
            }
            print(*row.values(), flush=True)
            rows.append(provenance | row)
    path = args.out / "published-phases.csv"
    path.unlink(missing_ok=True)
    report.append(path, rows, (*provenance, *COLUMNS))
    print(path)


if __name__ == "__main__":
    main()
