"""Validation losses of models trained with memkern.compress(saved_bits=...).

A byte-level GPT (memkern.train's, torch's GELU) and a Llama of transformers, the running Python's standard library as
text, AdamW, the same seeds and batches in every mode. Three seeds of 300 steps, one run of 3,000 steps of the Llama.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import memkern
from benchmarks import machine, report
from lab.studies import study

from .activation_parity import Setting, train, validation_loss

COLUMNS = (*report.PROVENANCE, "model", "mode", "seed", "steps", "tokens", "loss")
MODES: dict[str, Any] = {"torch": None, "exact": "exact", "8": 8}
SETTING = Setting(layers=2, width=128)


class Logits(nn.Module):
    """A model of transformers that gives its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


def llama(seed: int) -> nn.Module:
    import transformers

    torch.manual_seed(seed)
    sizes = {"hidden_size": SETTING.width, "intermediate_size": 3 * SETTING.width, "vocab_size": 256}
    heads = {"num_attention_heads": SETTING.heads, "num_key_value_heads": SETTING.heads // 2}
    config = transformers.LlamaConfig(**sizes, **heads, num_hidden_layers=SETTING.layers)
    return Logits(transformers.LlamaForCausalLM(config))


def gpt(seed: int) -> nn.Module:
    from memkern.train.model import GPT

    torch.manual_seed(seed)
    s = SETTING
    return GPT(layers=s.layers, heads=s.heads, width=s.width, seq_len=s.seq_len)


BUILD: dict[str, Callable[[int], nn.Module]] = {"GPT": gpt, "Llama": llama}


def runs(seeds: int, steps: int, long: int) -> Iterator[tuple[str, str, int, int]]:
    """(model, mode, seed, steps)."""
    for seed in range(seeds):
        yield from ((name, mode, seed, steps) for name in BUILD for mode in MODES)
    if long:
        yield from (("Llama", mode, 0, long) for mode in ("torch", "8"))


def main(argv: list[str] | None = None) -> None:
    from memkern.train.data import load_corpus

    parser = study.parser("saved_parity", __doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--long", type=int, default=3000, help="steps of the longer run; 0 leaves it out")
    args = parser.parse_args(argv)
    provenance = machine.provenance("cpu")
    corpus = load_corpus([], seq_len=SETTING.seq_len)
    path = args.out / "saved-parity.csv"
    for name, mode, seed, steps in runs(args.seeds, args.steps, args.long):
        model = BUILD[name](seed)
        if MODES[mode] is not None:
            memkern.compress(model, saved_bits=MODES[mode])
        train(model, corpus.train, SETTING, steps, SETTING.lr, seed)
        loss = validation_loss(model, corpus.validation, SETTING)
        tokens = steps * SETTING.batch_size * SETTING.seq_len
        values = (name, mode, str(seed), str(steps), str(tokens), f"{loss:.5g}")
        report.append(path, [study.row(provenance, COLUMNS, values)], COLUMNS)
        print(*values, flush=True)
    print(path)


if __name__ == "__main__":
    main()
