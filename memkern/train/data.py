"""Text as bytes: which files, a uint8 tensor for training, one for validation, and the batches of a step."""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..options import OptionError
from .config import TrainConfig
from .files import find_files
from .tables import TEXT_FIELD, is_table, texts

VALIDATION_SHARE = 10  # one byte in ten: the tail of every file
IGNORED = -100  # a target that is not predicted: torch's ignore_index


class Batch(NamedTuple):
    """A micro-batch of B windows of T tokens."""

    inputs: Tensor
    """(B, T), int64."""
    targets: Tensor
    """(B, T), int64: the next tokens; IGNORED where there is none."""

    @property
    def predicted(self) -> int:
        """How many targets are predicted."""
        return int((self.targets != IGNORED).sum())


@dataclasses.dataclass(frozen=True)
class Corpus:
    """``train`` and ``validation``: 1-D, on the CPU, uint8. ``digest`` identifies the two."""

    train: Tensor
    validation: Tensor
    name: str
    files: int
    digest: str
    left_out: Sequence[str] = ()
    """Files of the folders that are no text, each with the reason."""
    unit: ClassVar[str] = "byte"
    """The unit of sizes and losses."""

    def description(self) -> str:
        """Name and sizes in one line, and what was left out."""
        left_out = ""
        if self.left_out:
            more = f" and {len(self.left_out) - 3} more" if len(self.left_out) > 3 else ""
            left_out = f"; left out: {', '.join(self.left_out[:3])}{more}"
        return (
            f"{self.name} ({self.files} files): {len(self.train):,} {self.unit}s for training, "
            f"{len(self.validation):,} for validation{left_out}"
        )

    def steps_per_epoch(self, config: TrainConfig) -> int:
        """Steps that predict as many targets as the text has."""
        return -(-(len(self.train) - 1) // config.tokens_per_step)

    def step(self, config: TrainConfig, step: int) -> list[Batch]:
        """The micro-batches of a step, of all processes."""
        batches = step_batches(
            self.train,
            seed=config.seed,
            step=step,
            accumulation=config.micro_batches,
            micro_batch=config.techniques.micro_batch,
            seq_len=config.seq_len,
        )
        return [Batch(*batch) for batch in batches]

    def validation_batches(self, config: TrainConfig) -> list[Batch]:
        return validation_batches_of(self.validation, config)


def validation_batches_of(tokens: Tensor, config: TrainConfig) -> list[Batch]:
    """The first ``eval_tokens`` of a text's validation part."""
    batches = validation_batches(
        tokens,
        tokens=config.eval_tokens,
        micro_batch=config.techniques.micro_batch,
        seq_len=config.seq_len,
    )
    return [Batch(*batch) for batch in batches]


def check_lengths(name: str, train: int, validation: int, seq_len: int, unit: str) -> None:
    """Raises OptionError unless both are long enough for a window and its targets."""
    if not train and not validation:
        raise OptionError("data", f"{name!r} given, which holds no text; allowed: files or folders of text")
    if not train or not validation:
        part = "training" if validation else "validation"
        why = "every tenth row of a table is for validation, and the last tenth of a text"
        raise OptionError("data", f"{name!r} given, which holds no text for {part} ({why}); allowed: ten rows or more")
    shortest = min(train, validation)
    if shortest >= seq_len + 1:
        return
    if shortest <= 1:
        text = f"{seq_len} given, but {name!r} has {train + validation} {unit}s in all; allowed: more text with --data"
        raise OptionError("seq_len", text)
    raise OptionError(
        "seq_len",
        f"{seq_len} given, but {name!r} has {train} {unit}s for training and {validation} for validation; "
        f"allowed: 1 to {shortest - 1}, or more text with --data",
    )


def read_bytes(path: Path, text_field: str) -> tuple[bytes, bytes]:
    """A file's bytes for training and for validation: its last tenth, of a table every tenth row.

    A row of a table is its text in UTF-8 and a newline.
    """
    if is_table(path):
        parts: tuple[list[str], list[str]] = ([], [])
        for number, text in enumerate(texts(path, text_field), 1):
            parts[number % VALIDATION_SHARE == 0].append(text + "\n")
        return "".join(parts[0]).encode(), "".join(parts[1]).encode()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise OptionError("data", f"{str(path)!r} cannot be read: {error}") from error
    cut = len(content) - len(content) // VALIDATION_SHARE
    return content[:cut], content[cut:]


def load_corpus(data: Sequence[str] = (), *, seq_len: int, text_field: str | None = None) -> Corpus:
    """Reads files and folders whole into memory; the last tenth of every file's bytes is for validation.

    Of a table (.jsonl, .json, .csv, .tsv, .parquet) the text is that of ``text_field`` (default "text"), and every
    tenth row is for validation. Empty ``data``: ``standard_library_files()``. Raises OptionError where nothing can be
    read, or where training or validation text is too short for one window of seq_len + 1 bytes.
    """
    files = find_files(data)
    name = " ".join(data) if data else f"Python {sysconfig.get_python_version()} standard library"
    train, validation = bytearray(), bytearray()
    for path in files.paths:
        parts = read_bytes(path, text_field or TEXT_FIELD)
        train += parts[0]
        validation += parts[1]
    check_lengths(name, len(train), len(validation), seq_len, "byte")
    digest = hashlib.blake2b(train, digest_size=16)
    digest.update(len(train).to_bytes(8, "little"))
    digest.update(validation)
    return Corpus(
        train=torch.frombuffer(train, dtype=torch.uint8),
        validation=torch.frombuffer(validation, dtype=torch.uint8),
        name=name,
        files=len(files.paths),
        digest=digest.hexdigest(),
        left_out=files.left_out,
    )


def windows(text: Tensor, starts: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 of shape (len(starts), seq_len): the targets are the inputs' next bytes."""
    taken = text[starts[:, None] + torch.arange(seq_len + 1)].long()
    return taken[:, :-1], taken[:, 1:]


def step_batches(
    text: Tensor, *, seed: int, step: int, accumulation: int, micro_batch: int, seq_len: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The micro-batches of one step, which depend on (seed, step) alone and are drawn together.

    So a resumed run needs no state of the data, and k micro-batches of b windows hold what one of k*b holds.
    """
    mixed = hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(mixed, "little"))
    starts = torch.randint(len(text) - seq_len, (accumulation * micro_batch,), generator=generator)
    for micro in starts.split(micro_batch):
        yield windows(text, micro, seq_len)


def validation_batches(text: Tensor, *, tokens: int, micro_batch: int, seq_len: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Always the same windows: tokens // seq_len of them (at least one), evenly spread, without overlap."""
    available = (len(text) - 1) // seq_len
    count = max(1, min(tokens // seq_len, available))
    starts = torch.arange(count) * available // count * seq_len
    for some in starts.split(micro_batch):
        yield windows(text, some, seq_len)
