"""Weights on the host: what memkern.plan predicts for 7 to 70 billion parameters, beside FSDP2 on fake CUDA.

One sequence, bf16 weights with 8-bit errors, checkpoints, the loss in chunks, a step in backward. device_gib:
predicted, process included; counted_gib: the peak of fully_shard's own code on fake CUDA tensors
(tests/support/streamed_bytes.py), and the same process. host_gib: weights and gradients under way in pinned memory,
errors, states of AdamW8bit; muon_gib: of Muon8bit. link_LINK, step_LINK: tokens of a micro-batch from which arithmetic
hides the weights' transfers, and from which the backward pass hides the host's step, by the planner's estimate: with
pcie4 for the planner's card of 12 GB (25 TFLOP/s, 30 GB/s of the host's memory), else for 400 TFLOP/s and 200 GB/s.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any

from benchmarks import report
from lab.studies import study
from memkern.options import Techniques
from memkern.planner import fake_cuda

GIB = 2**30
CASES = (
    ("llama-2-7b", 4096),
    ("llama-3.1-8b", 8192),
    ("llama-3.1-8b", 16384),
    ("qwen3-14b", 8192),
    ("qwen3-32b", 8192),
    ("llama-3.1-70b", 8192),
    ("llama-3.1-70b", 32768),
)
TECHNIQUES: dict[str, Any] = {
    "precision": "bf16", "master_weights": "bf16+8", "state_bits": 8, "checkpointing": "blocks", "loss_chunk": 4096,
    "step_in_backward": True, "weights_on_host": "layers",
}  # fmt: skip
SERVER: dict[str, Any] = {"half_flops": 400e12, "host_bandwidth": 200e9}
LINKS: dict[str, dict[str, Any]] = {"pcie4": {}, "pcie5": SERVER, "c2c": SERVER}
COLUMNS = (
    *report.PROVENANCE, "transformers", "model", "parameters", "tokens", "device_gib", "counted_gib", "host_gib",
    "host_per_parameter", "muon_gib",
    *(f"{what}_{link}" for link in LINKS for what in ("link", "step")),
)  # fmt: skip


def figures(model: str, tokens: int) -> list[str]:
    """The figures of a row. Call with fake CUDA."""
    from memkern.planner import hardware
    from memkern.planner.models import resolve
    from memkern.planner.prediction import Predictor
    from tests.support import streamed_bytes

    techniques = Techniques(**TECHNIQUES)
    source: Any = resolve(model, tokens, None, None, 0.0)
    card = hardware.DEFAULTS["cuda"]
    predictor = Predictor(source, "cuda", "cuda", card)
    found = predictor.predict(techniques)
    count = predictor.fixed(techniques).count
    counted = max(streamed_bytes.peak_of_a_step(source, techniques).values()) + card.process
    muon = predictor.held_on_host(techniques.replace(optimizer="muon"))
    hidden = []
    for link, speeds in LINKS.items():
        machine = dataclasses.replace(card, link=hardware.LINKS[link], **speeds)
        both = Predictor(source, "cuda", "cuda", machine).hides(techniques)
        hidden += [str(n) for n in both]
    sizes = [f"{size / GIB:.2f}" for size in (found.peak, counted, found.host)]
    return [model, str(count), str(tokens), *sizes, f"{found.host / count:.3f}", f"{muon / GIB:.2f}", *hidden]


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("plan_streamed", __doc__)
    parser.add_argument("--cases", nargs="+", type=int, default=list(range(len(CASES))), metavar="N")
    args = parser.parse_args(argv)
    provenance = study.provenance_with_transformers()

    def rows() -> Iterator[dict[str, str]]:
        for model, tokens in (CASES[n] for n in args.cases):
            arguments = {"model": model, "tokens": tokens}
            found = fake_cuda.call(pickle.dumps((figures, arguments)))
            yield study.row(provenance, COLUMNS, found)

    study.write(args.out / "plan-streamed.csv", rows(), COLUMNS, 14)


if __name__ == "__main__":
    from lab.studies.plan_streamed import main as run  # so that a process finds ``figures`` by its module's name

    run()
