"""A small GPT-2 of transformers, plain and compiled, and random texts for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

import memkern
from tests.support.helpers import skip_unless_torch_compiles

VOCABULARY, TOKENS, WIDTH = 64, 16, 64
TRAINER: dict[str, Any] = {
    "learning_rate": 1e-3, "weight_decay": 0.1, "report_to": [], "save_strategy": "no", "use_cpu": True,
    "disable_tqdm": True, "logging_steps": 1,
}  # fmt: skip
"""Arguments of transformers' Trainer."""


def gpt2(seed: int = 0) -> Any:
    """transformers' GPT-2, two layers of width 64, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    dropout = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": TOKENS, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))


def compiled_gpt2(seed: int = 0) -> Any:
    """:func:`gpt2` with blocks that are compiled in place and save 8-bit codes."""
    skip_unless_torch_compiles()
    return memkern.compile(gpt2(seed), saved_bits=8)


def tokens(rows: int, seed: int = 0, vocabulary: int = VOCABULARY, length: int = TOKENS) -> Tensor:
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


class Texts(Dataset[dict[str, Tensor]]):
    """Random rows of tokens, as the Trainer takes them."""

    def __init__(self, rows: int = 32, **sizes: int) -> None:
        self.rows = tokens(rows, **sizes)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def parameters_of(model: torch.nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]
