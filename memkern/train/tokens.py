"""Tokens of a model of transformers: the text's windows and the labelled texts, in a new order at each epoch."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..options import OptionError
from .config import TrainConfig
from .data import IGNORED, Batch, Corpus, check_lengths, validation_batches
from .documents import Documents
from .tokenizers import Tokenizer, encode_each, stream

MAX_CLASSES = 1000


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
        batches = validation_batches(
            self.validation,
            tokens=config.eval_tokens,
            micro_batch=config.techniques.micro_batch,
            seq_len=config.seq_len,
        )
        return [Batch(*batch) for batch in batches]


@dataclasses.dataclass(frozen=True)
class LabelledTexts(Corpus):
    """Texts of at most seq_len tokens with a class each; ``train`` and ``validation`` are the classes, int64."""

    train_texts: list[Tensor]
    validation_texts: list[Tensor]
    classes: tuple[str, ...]
    pad: int
    unit: ClassVar[str] = "text"
    rate_unit: ClassVar[str] = "texts"

    def per_step(self, config: TrainConfig) -> int:
        return config.batch_size

    def steps_per_epoch(self, config: TrainConfig) -> int:
        return steps_per_epoch(len(self.train), config)

    def step(self, config: TrainConfig, step: int) -> list[Batch]:
        micro = items_of_step(len(self.train), config, step)
        return [self.batch(self.train_texts, self.train, items) for items in micro]

    def batch(self, texts: Sequence[Tensor], classes: Tensor, items: Tensor) -> Batch:
        """The texts, padded on the right to the longest."""
        taken = [texts[i] for i in items.tolist()]
        inputs = torch.nn.utils.rnn.pad_sequence(taken, batch_first=True, padding_value=self.pad)
        lengths = torch.tensor([len(text) for text in taken])
        mask = torch.arange(inputs.shape[1]) < lengths[:, None]
        return Batch(inputs.long(), classes[items], mask.long())

    def validation_batches(self, config: TrainConfig) -> list[Batch]:
        """At most eval_tokens // seq_len texts (at least one), evenly spread: always the same ones."""
        available = len(self.validation)
        count = max(1, min(config.eval_tokens // config.seq_len, available))
        items = torch.arange(count) * available // count
        return [
            self.batch(self.validation_texts, self.validation, some)
            for some in items.split(config.techniques.micro_batch)
        ]


def digest_of(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(len(tensor).to_bytes(8, "little"))
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def name_of(config: TrainConfig) -> str:
    return " ".join(config.data) if config.data else "Python's standard library"


def token_corpus(
    config: TrainConfig, train: Documents, validation: Documents, files: int, tokenizer: Tokenizer
) -> Tokens:
    """Windows of all documents. Raises OptionError where they are shorter than a window."""
    streams = [stream(tokenizer, documents.texts) for documents in (train, validation)]
    check_lengths(name_of(config), len(streams[0]), len(streams[1]), config.seq_len, "token")
    return Tokens(streams[0], streams[1], name_of(config), files, digest_of(streams))


def class_names(documents: Documents, label_field: str) -> tuple[str, ...]:
    """The labels, sorted; as numbers, where all are whole numbers."""
    counted = Counter(documents.labels)
    if not 2 <= len(counted) <= MAX_CLASSES:
        raise OptionError(
            "label_field",
            f"{label_field!r} given, with {len(counted)} labels; allowed: 2 to {MAX_CLASSES} labels",
        )
    numbers = all(label.lstrip("-").isdecimal() for label in counted)
    return tuple(sorted(counted, key=int if numbers else None))


def labelled_corpus(
    config: TrainConfig,
    train: Documents,
    validation: Documents,
    files: int,
    tokenizer: Tokenizer,
    classes: tuple[str, ...],
) -> LabelledTexts:
    """Raises OptionError for too few rows, and for a validation row whose label no training row has."""
    if not validation.texts:
        rows = len(train.texts)
        raise OptionError(
            "data", f"given with {rows} rows; allowed: 10 or more, of which every tenth is for validation"
        )
    numbers = {name: number for number, name in enumerate(classes)}
    unknown = next((label for label in validation.labels if label not in numbers), None)
    if unknown is not None:
        raise OptionError("label_field", f"given, but the label {unknown!r} is in no row for training")
    labels = [
        torch.tensor([numbers[label] for label in documents.labels]) for documents in (train, validation)
    ]
    texts = [encode_each(tokenizer, documents.texts, config.seq_len) for documents in (train, validation)]
    return LabelledTexts(
        labels[0],
        labels[1],
        name_of(config),
        files,
        digest_of([*labels, *texts[0], *texts[1]]),
        train_texts=texts[0],
        validation_texts=texts[1],
        classes=classes,
        pad=tokenizer.pad,
    )
