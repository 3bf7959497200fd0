"""Finds and reads the text to train on, and cuts it into the windows of a step."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..techniques.options import OptionError, refused
from .config import TrainConfig

VALIDATION_SHARE = 10
"""The last tenth of a text, and every tenth row of JSON lines, is for validation."""
CHARACTERS = 2**20  # of text, encoded at once: an encoding takes some 100 bytes per token
JSON_LINES = (".jsonl", ".ndjson")
TABLES = (".csv", ".tsv", ".parquet", ".json")
ALLOWED = "allowed: text in UTF-8 or JSON lines (.jsonl), which datasets' to_json writes of other tables"

Batch = tuple[Tensor, Tensor]
"""A micro-batch of B windows of T tokens: (B, T) int64 each, the inputs and their next tokens."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The token ids of all texts, 1-D on the CPU."""

    train: Tensor
    validation: Tensor
    name: str
    files: int = 1
    left_out: Sequence[str] = ()
    tokenizer: Any = None

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the text."""
        digest = hashlib.blake2b(digest_size=16)
        for ids in (self.train, self.validation):
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(ids.numpy().tobytes())
        return digest.hexdigest()

    def description(self) -> str:
        """Name and sizes in one line, and what was left out of folders."""
        examples = ", ".join([*self.left_out[:3], *(["..."] if len(self.left_out) > 3 else [])])
        return (
            f"{self.name} ({self.files} files): {len(self.train):,} tokens for training, "
            f"{len(self.validation):,} for validation" + (f"; left out as no text: {examples}" if examples else "")
        )

    def step(self, config: TrainConfig, step: int) -> list[Batch]:
        """The micro-batches of a step, of all processes: windows at places that depend on the seed and the step alone.

        So a resumed run needs no state of the data, and k micro-batches of b windows hold what one of k*b holds.
        """
        hashed = hashlib.blake2b(f"{config.seed}/{step}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(hashed, "little"))
        starts = torch.randint(len(self.train) - config.seq_len, (config.batch_size,), generator=generator)
        return list(windows(self.train, starts, config))

    def validation_batches(self, config: TrainConfig) -> list[Batch]:
        """Always the same windows: eval_tokens // seq_len of them (at least one), evenly spread, without overlap."""
        available = (len(self.validation) - 1) // config.seq_len
        count = max(1, min(config.eval_tokens // config.seq_len, available))
        starts = torch.arange(count) * available // count * config.seq_len
        return list(windows(self.validation, starts, config))


def windows(ids: Tensor, starts: Tensor, config: TrainConfig) -> Iterator[Batch]:
    """The windows that begin at ``starts``, in micro-batches."""
    for firsts in starts.split(config.micro_batch):
        tokens = ids[firsts[:, None] + torch.arange(config.seq_len + 1)].long()
        yield tokens[:, :-1], tokens[:, 1:]


def load_corpus(data: Sequence[str] = (), *, seq_len: int, text_field: str = "text", tokenizer: Any = None) -> Corpus:
    """Reads files and folders whole into memory. tokenizer: transformers'; by default UTF-8 bytes are the tokens.

    Raises OptionError for a file that cannot be read or is no text, for a row without the field, and where the text for
    training or for validation is shorter than a window of seq_len + 1 tokens.
    """
    name = " ".join(data) if data else f"Python {sysconfig.get_python_version()} standard library"
    texts: tuple[list[str], list[str]] = ([], [])  # for training and for validation
    left_out: list[str] = []
    named = {Path(each).resolve() for each in data}
    files = dict.fromkeys(find_files(data) if data else standard_library_files())  # each once
    for path in files:
        try:
            text = read(path)
        except OptionError:
            if path in named:
                raise
            left_out.append(str(path))
            continue
        if path.suffix.lower() in JSON_LINES:
            for number, row in enumerate(rows(text, path, text_field), 1):
                texts[number % VALIDATION_SHARE == 0].append(row)
        else:
            cut = len(text) - len(text) // VALIDATION_SHARE
            texts[0].append(text[:cut])
            texts[1].append(text[cut:])
    train, validation = (encode([*filter(None, documents)], tokenizer) for documents in texts)
    corpus = Corpus(train, validation, name, len(files) - len(left_out), left_out, tokenizer)
    shortest = min(len(train), len(validation))
    if shortest <= seq_len:
        allowed = f"1 to {shortest - 1}, or more text with --data" if shortest > 1 else "more text with --data"
        text = "which is the last tenth of a text and every tenth row of JSON lines"
        raise OptionError("seq_len", f"{seq_len} given with {corpus.description()}, {text}; allowed: {allowed}")
    return corpus


def encode(documents: Sequence[str], tokenizer: Any) -> Tensor:
    """The ids of documents: bytes with a newline between two, or a tokenizer's with its end token after each."""
    if tokenizer is None:
        text = bytearray("\n".join(documents).encode())
        return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    ends = (tokenizer.eos_token_id, tokenizer.sep_token_id)
    end = next(([i] for i in ends if i is not None), [])
    parts = [torch.empty(0, dtype=torch.int32)]
    for document in documents:
        for begin in range(0, len(document), CHARACTERS):
            piece = document[begin : begin + CHARACTERS]
            ids = tokenizer(piece, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
            parts.append(torch.tensor(ids, dtype=torch.int32))
        parts.append(torch.tensor(end, dtype=torch.int32))
    return torch.cat(parts)


def rows(text: str, path: Path, field: str) -> Iterator[str]:
    """The texts of JSON lines. Raises OptionError, with the line, where there is none."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"line {number} of {str(path)!r}"
        with refused("text_field", f"{field!r} given; allowed: a field with a text, which is not in {where}"):
            value = json.loads(line)[field]
            value.encode()  # JSON can spell half a surrogate pair, UTF-8 cannot
        yield value


def read(path: Path) -> str:
    """The file's UTF-8 text, without a byte order mark. Raises OptionError for any other file."""
    with refused("data", f"{str(path)!r} given; {ALLOWED}"):
        if path.suffix.lower() in TABLES:
            raise ValueError(f"a {path.suffix} file")
        with path.open("rb") as file:
            head = file.read(8192)
            if 0 in head:  # git's rule for binary files
                raise ValueError("a binary file")
            return (head + file.read()).decode("utf-8-sig")


def find_files(data: Sequence[str]) -> Iterator[Path]:
    """The files that ``data`` names, and those under its folders, sorted by path, without hidden ones."""

    def fail(error: OSError) -> None:
        raise OptionError("data", f"{str(error.filename)!r} cannot be read: {error.strerror}") from error

    for path in map(Path, data):
        if os.path.isfile(path):
            yield path.resolve()
            continue
        for parent, folders, names in os.walk(path, onerror=fail):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            files = (Path(parent, name) for name in sorted(names) if not name.startswith("."))
            yield from (file.resolve() for file in files if file.is_file())


def standard_library_files() -> list[Path]:
    """The running Python's own .py files, sorted by path, without site-packages and without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return [
        path
        for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
        if left_out.isdisjoint(path.relative_to(root).parts[:-1])
    ]
