"""Plans steps with weights on the host, for 7 to 70 billion parameters, and counts FSDP2's bytes on fake CUDA.

Each case has one sequence, bf16 weights with 8-bit errors, checkpoints, the loss in chunks, and a step in backward.
device_gib is the predicted peak, the process's own bytes included; counted_gib is the peak counted in fully_shard's
own code on fake CUDA tensors (tests/support/streamed_bytes.py). host_gib and muon_gib are the host's bytes of weights,
gradients in pinned memory, errors, and the states of AdamW8bit or Muon8bit. link_LINK is the least number of tokens in
a micro-batch whose arithmetic takes as long as the transfers of weights over LINK; step_LINK is the least number whose
backward pass takes as long as the host's step. LINK pcie4 has the planner's card of 12 GB (25 TFLOP/s, 30 GB/s of the
host's memory); the other links have 400 TFLOP/s and 200 GB/s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from benchmarks import report
from lab.studies import study
from memkern.planner import fake_cuda
from memkern.techniques.options import Techniques

GIB = 2**30
LLAMA3: dict[str, Any] = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
QWEN3: dict[str, Any] = {"num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 64,
                         "num_key_value_heads": 8, "intermediate_size": 25600}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2-7b": ("llama", {"max_position_embeddings": 4096}),
    "llama-3.1-8b": ("llama", LLAMA3 | {"intermediate_size": 14336}),
    "llama-3.1-70b": ("llama", LLAMA3 | {"num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": 8192,
                                         "intermediate_size": 28672}),
    "qwen3-14b": ("qwen3", QWEN3 | {"num_hidden_layers": 40, "num_attention_heads": 40, "intermediate_size": 17408}),
    "qwen3-32b": ("qwen3", QWEN3),
}  # fmt: skip
CASES = (  # model, tokens
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
LINKS: dict[str, dict[str, Any]] = {
    "pcie4": {"link": 25e9},
    "pcie5": SERVER | {"link": 50e9},
    "c2c": SERVER | {"link": 360e9},
}
"""Bytes per second in one direction: four fifths of the nominal rates of PCIe 4.0 and 5.0 x16 and of NVLink-C2C."""
COLUMNS = (
    *report.PROVENANCE, "transformers", "model", "parameters", "tokens", "device_gib", "counted_gib", "host_gib",
    "host_per_parameter", "muon_gib",
    *(f"{what}_{link}" for link in LINKS for what in ("link", "step")),
)  # fmt: skip


def figures(model: str, tokens: int) -> list[str]:
    """The figures of a row. It runs in a process with fake CUDA."""
    import transformers

    from memkern.planner import hardware
    from memkern.planner.models import resolve
    from memkern.planner.prediction import Predictor
    from tests.support import streamed_bytes

    techniques = Techniques(**TECHNIQUES)
    kind, sizes = MODELS[model]
    source: Any = resolve(transformers.CONFIG_MAPPING[kind](**sizes), tokens, None, None, 0.0)
    card = hardware.DEFAULTS["cuda"]
    predictor = Predictor(source, "cuda", "cuda", card)
    prediction = predictor.predict(techniques)
    static = predictor.static_bytes(techniques)
    count = static.count
    counted = max(streamed_bytes.peak_of_a_step(source, techniques).values()) + card.process
    muon = predictor.held_on_host(techniques.replace(optimizer="muon"))
    hiding_tokens = []
    for speeds in LINKS.values():
        machine = dataclasses.replace(card, **speeds)
        forward_s = (2 * count + source.attention * source.tokens) / machine.half_flops  # per token
        backward_s = 3 * forward_s  # a checkpointed block runs forward again
        step_bytes = 3 * static.parameters + 2 * (static.optimizer + static.errors)  # read and written by the host
        hiding_tokens += [
            math.ceil(prediction.brought / machine.link / forward_s),
            math.ceil(step_bytes / machine.host_bandwidth / backward_s),
        ]
    gib = [f"{size / GIB:.2f}" for size in (prediction.peak, counted, prediction.host)]
    host = (f"{prediction.host / count:.3f}", f"{muon / GIB:.2f}")  # host_per_parameter, muon_gib
    return [model, str(count), str(tokens), *gib, *host, *map(str, hiding_tokens)]


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("plan_streamed", __doc__)
    parser.add_argument("--cases", nargs="+", type=int, default=list(range(len(CASES))), metavar="N")
    args = parser.parse_args(argv)
    provenance = study.provenance_with_transformers()

    def rows() -> Iterator[dict[str, str]]:
        for model, tokens in (CASES[n] for n in args.cases):
            yield study.row(provenance, COLUMNS, fake_cuda.call(figures, model=model, tokens=tokens))

    study.write(args.out / "plan-streamed.csv", rows(), COLUMNS, 14)


if __name__ == "__main__":
    from lab.studies.plan_streamed import main as run  # a process imports ``figures`` by its module's name

    run()
