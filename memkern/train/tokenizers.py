"""Text to token ids: a model's own tokenizer, a byte-level BPE trained on the text, or bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..options import OptionError

END, PAD = "<|endoftext|>", "<|pad|>"
BATCH_CHARACTERS = 2**20  # of text encoded at once: an encoding takes some 100 bytes per token
BPE_CHARACTERS = 2**22  # of the text that a BPE is trained on


class Tokenizer(Protocol):
    """eos ends a document (None: no token does); all ids are below size."""

    @property
    def size(self) -> int: ...

    @property
    def eos(self) -> int | None: ...

    def encode(self, texts: list[str]) -> list[list[int]]: ...

    def save(self, folder: Path) -> None: ...


class Bytes:
    """UTF-8 bytes; 256 ends a document, and 257 is for padding."""

    size, eos = 258, 256

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[*text.encode()] for text in texts]

    def save(self, folder: Path) -> None:
        """Writes nothing: bytes need no vocabulary."""


class FromTransformers:
    """A tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.size = len(tokenizer)
        self.eos = next((i for i in (tokenizer.eos_token_id, tokenizer.sep_token_id) if i is not None), None)

    def encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]

    def save(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)


def sample(texts: Sequence[str], characters: int) -> Iterator[str]:
    """About ``characters`` of the texts, or all: the beginning of each text, in proportion to its length."""
    share = min(1.0, characters / max(1, sum(map(len, texts))))
    for text in texts:
        yield text[: max(1, int(share * len(text)))]


def train_bpe(texts: Sequence[str], size: int) -> FromTransformers:
    """A byte-level BPE (GPT-2's) of at most ``size`` ids, from at most BPE_CHARACTERS of the texts.

    Sennrich et al., arXiv 1508.07909; on bytes, so that no text is unknown, Radford et al. 2019.
    """
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if size < len(alphabet) + 2:
        raise OptionError("model", f"given with {size} ids; a byte-level tokenizer needs {len(alphabet) + 2}")
    tokenizer = Fast(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END, PAD], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(sample(texts, BPE_CHARACTERS), trainer)
    return FromTransformers(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD))


def pieces(texts: Iterable[str]) -> Iterator[tuple[int, str]]:
    """(index of the text, piece): texts longer than BATCH_CHARACTERS are cut before a line."""
    for index, text in enumerate(texts):
        begin = 0
        while len(text) - begin > BATCH_CHARACTERS:
            cut = text.rfind("\n", begin + 1, begin + BATCH_CHARACTERS)
            cut = begin + BATCH_CHARACTERS if cut < 0 else cut
            yield index, text[begin:cut]
            begin = cut
        yield index, text[begin:]


def batches(texts: Iterable[str]) -> Iterator[list[tuple[int, str]]]:
    """The pieces, about BATCH_CHARACTERS at a time."""
    batch: list[tuple[int, str]] = []
    length = 0
    for piece in pieces(texts):
        if batch and length + len(piece[1]) > BATCH_CHARACTERS:
            yield batch
            batch, length = [], 0
        batch.append(piece)
        length += len(piece[1])
    if batch:
        yield batch


def stream(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """The texts' ids one after another, int32, each text followed by eos."""
    parts: list[Tensor] = []
    before = 0
    ends = [] if tokenizer.eos is None else [tokenizer.eos]
    for batch in batches(texts):
        ids: list[int] = []
        for (index, _), encoded in zip(batch, tokenizer.encode([t for _, t in batch]), strict=True):
            if index != before:
                ids += ends
                before = index
            ids += encoded
        parts.append(torch.tensor(ids, dtype=torch.int32))
    return torch.cat([*parts, torch.tensor(ends, dtype=torch.int32)]) if parts else torch.empty(0, dtype=torch.int32)
