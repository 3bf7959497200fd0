"""Tokens of a model of transformers: the text's windows, in a new order at each epoch."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from .config import TrainConfig
from .data import IGNORED, Batch, Corpus, check_lengths, validation_batches_of
from .documents import Documents
from .tokenizers import Tokenizer, stream


@functools.lru_cache(maxsize=2)
def order(count: int, seed: int, epoch: int) -> Tensor:
    """A permutation of ``count`` items, which depends on the seed and the epoch alone."""
    mixed = hashlib.blake2b(f"{seed}/epoch {epoch}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(mixed, "little"))
    return torch.randperm(count, generator=generator)


def steps_per_epoch(count: int, config: TrainConfig) -> int:
    """Steps of an epoch; the last one has what is left."""
    return -(-count // config.batch_size)


def items_of_step(count: int, config: TrainConfig, step: int) -> list[Tensor]:
    """The items of a step's micro-batches: each of ``count`` items once per epoch, in the epoch's order."""
    epoch, place = divmod(step, steps_per_epoch(count, config))
    size = config.batch_size
    items = order(count, config.seed, epoch)[place * size : (place + 1) * size]
    return list(items.split(config.techniques.micro_batch))


@dataclasses.dataclass(frozen=True)
class Tokens(Corpus):
    """``train`` and ``validation``: 1-D int32 on the CPU. Items: windows of seq_len tokens, the last shorter."""

    unit: ClassVar[str] = "token"

    def windows(self, config: TrainConfig) -> int:
        return -(-(len(self.train) - 1) // config.seq_len)

    def steps_per_epoch(self, config: TrainConfig) -> int:
        return steps_per_epoch(self.windows(config), config)

    def step(self, config: TrainConfig, step: int) -> list[Batch]:
        micro = items_of_step(self.windows(config), config, step)
        return [self.batch(items, config.seq_len) for items in micro]

    def batch(self, items: Tensor, seq_len: int) -> Batch:
        """The windows. Positions beyond the text come last and are not predicted, so their inputs do not matter."""
        places = items[:, None] * seq_len + torch.arange(seq_len + 1)
        last = len(self.train) - 1
        taken = self.train[places.clamp(max=last)].long()
        return Batch(taken[:, :-1], taken[:, 1:].masked_fill(places[:, 1:] > last, IGNORED))

    def validation_batches(self, config: TrainConfig) -> list[Batch]:
        return validation_batches_of(self.validation, config)


def digest_of(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(len(tensor).to_bytes(8, "little"))
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def name_of(config: TrainConfig) -> str:
    return " ".join(config.data) if config.data else "Python's standard library"


def token_corpus(config: TrainConfig, documents: Documents, tokenizer: Tokenizer) -> Tokens:
    """Windows of all documents. Raises OptionError where they are shorter than a window."""
    streams = [stream(tokenizer, texts) for texts in (documents.train, documents.validation)]
    check_lengths(name_of(config), len(streams[0]), len(streams[1]), config.seq_len, "token")
    return Tokens(streams[0], streams[1], name_of(config), documents.files, digest_of(streams), documents.left_out)
