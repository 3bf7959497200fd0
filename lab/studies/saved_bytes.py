"""The bytes that a GPT-2 block saves for backward, for each way to compress it.

transformers' GPT2Block with random weights, fp32, sdpa, no dropout; bytes per token, every storage once, parameters
left out (memkern.memory.saved_bytes). No hardware is measured: the figures depend on shapes and operators only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memkern
from benchmarks import RESULTS, machine, report
from lab.studies import study
from memkern import memory

WIDTHS = (768, 1600)
TOKENS = 512
COLUMNS = (*report.PROVENANCE, "transformers", "width", "way", "bytes_per_token", "share")


def _fused(block: Any) -> None:
    block.mlp.act = nn.GELU(approximate="tanh")


def _compress(**options: Any) -> Callable[[Any], Any]:
    return lambda block: memkern.compress(block, **options)


WAYS: dict[str, Callable[[Any], Any]] = {
    "as it is (gelu_new)": lambda block: None,
    "torch's fused tanh-GELU": _fused,
    "compress, 4 bits": _compress(activations=4),
    "compress, 3 bits": _compress(),
    "compress, 2 bits": _compress(activations=2),
    "compress, 1 bit": _compress(activations=1),
    "compress, output and 1 bit": _compress(activations="output"),
    "compress, 3 bits, 20 % of tokens": _compress(linear=0.2),
    "compress, what is saved once, exactly": _compress(saved_bits="exact"),
    "compress, what is saved in 8 bits": _compress(saved_bits=8),
}


def bytes_per_token(width: int, change: Callable[[Any], Any]) -> float:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2Config

    dropout = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    config = GPT2Config(n_embd=width, n_head=width // 64, attn_implementation="sdpa", **dropout)
    with (mode := FakeTensorMode()):  # nothing is computed: bytes do not depend on values
        block = GPT2Block(config, layer_idx=0)
    change(block)
    with mode:
        x = torch.empty(1, TOKENS, width, requires_grad=True)
        # Another operation's result, as in a model: a leaf would be held by the graph anyway.
        return memory.saved_bytes(lambda: block(x.roll(1, 1))) / TOKENS


def results() -> Iterator[dict[str, str]]:
    import transformers

    provenance = machine.provenance("cpu") | {"transformers": transformers.__version__}
    for width in WIDTHS:
        before = bytes_per_token(width, WAYS["as it is (gelu_new)"])
        for way, change in WAYS.items():
            saved = bytes_per_token(width, change)
            values = (str(width), way, f"{saved:.1f}", f"{saved / before:.4f}")
            yield study.row(provenance, COLUMNS, values)


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("saved_bytes", __doc__, RESULTS)
    args = parser.parse_args(argv)
    rows = list(results())
    print("GPT-2 block, saved for the backward pass, bytes per token")
    for row in rows:
        share, saved = float(row["share"]), float(row["bytes_per_token"])
        print(f"  width {row['width']:>4}  {row['way']:<38} {saved:>10,.0f}  {share:6.1%}")
    path = args.out / "saved-bytes.csv"
    report.append(path, rows, COLUMNS)
    print(path)


if __name__ == "__main__":
    main()
