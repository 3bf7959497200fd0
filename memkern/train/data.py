"""Text to train on: which files, their documents, and the windows of a step."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..techniques.options import OptionError
from .config import TrainConfig

VALIDATION_SHARE = 10
"""The last tenth of a text, and every tenth row of JSON lines, is for validation."""
JSON_LINES = (".jsonl", ".ndjson")
TABLES = (".csv", ".tsv", ".parquet", ".json")
CURE = "text in UTF-8 or JSON lines (.jsonl), which datasets' to_json writes of other tables"


class Bytes:
    """UTF-8 bytes as tokens; a newline is between two documents. unit: what an id stands for; ids are below size."""

    unit, size = "byte", 256

    def ids(self, documents: Sequence[str]) -> Tensor:
        return torch.frombuffer(bytearray("\n".join(documents).encode()), dtype=torch.uint8)

    def save(self, folder: Path) -> None:
        """Writes nothing: bytes need no vocabulary."""


class Documents(NamedTuple):
    """The texts for training and for validation, the number of their files, and what was left out of folders."""

    train: list[str]
    validation: list[str]
    files: int
    left_out: list[str]


class Batch(NamedTuple):
    """A micro-batch of B windows of T tokens: (B, T) int64 each, the targets the inputs' next tokens."""

    inputs: Tensor
    targets: Tensor


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The ids of all texts, 1-D on the CPU."""

    train: Tensor
    validation: Tensor
    name: str
    files: int = 1
    left_out: Sequence[str] = ()
    unit: str = "byte"

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the text."""
        digest = hashlib.blake2b(digest_size=16)
        for ids in (self.train, self.validation):
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(ids.numpy().tobytes())
        return digest.hexdigest()

    def description(self) -> str:
        """Name and sizes in one line, and what was left out."""
        some = ", ".join(self.left_out[:3]) + (f" and {n} more" if (n := len(self.left_out) - 3) > 0 else "")
        return (
            f"{self.name} ({self.files} files): {len(self.train):,} {self.unit}s for training, "
            f"{len(self.validation):,} for validation" + (f"; left out: {some}" if some else "")
        )

    def step(self, config: TrainConfig, step: int) -> list[Batch]:
        """The micro-batches of a step, of all processes: windows at places that depend on the seed and the step alone.

        So a resumed run needs no state of the data, and k micro-batches of b windows hold what one of k*b holds.
        """
        mixed = hashlib.blake2b(f"{config.seed}/{step}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(mixed, "little"))
        starts = torch.randint(len(self.train) - config.seq_len, (config.batch_size,), generator=generator)
        return list(windows(self.train, starts, config))

    def validation_batches(self, config: TrainConfig) -> list[Batch]:
        """Always the same windows: eval_tokens // seq_len of them (at least one), evenly spread, without overlap."""
        available = (len(self.validation) - 1) // config.seq_len
        count = max(1, min(config.eval_tokens // config.seq_len, available))
        starts = torch.arange(count) * available // count * config.seq_len
        return list(windows(self.validation, starts, config))


def windows(ids: Tensor, starts: Tensor, config: TrainConfig) -> Iterator[Batch]:
    """The windows that begin there, in micro-batches."""
    for some in starts.split(config.techniques.micro_batch):
        taken = ids[some[:, None] + torch.arange(config.seq_len + 1)].long()
        yield Batch(taken[:, :-1], taken[:, 1:])


def load_corpus(data: Sequence[str] = (), *, seq_len: int, text_field: str = "text", tokenizer: Any = None) -> Corpus:
    """Reads files and folders whole into memory. tokenizer: :class:`Bytes` by default.

    Raises OptionError for what cannot be read, is no text or has no such field, and where the text for training or for
    validation is shorter than a window of seq_len + 1 tokens.
    """
    tokenizer = tokenizer or Bytes()
    name = " ".join(data) if data else f"Python {sysconfig.get_python_version()} standard library"
    found = read_documents(data, text_field)
    if not found.train or not found.validation:
        raise OptionError(
            "data", f"{name!r} given, which holds no text for {'validation' if found.train else 'training'}: every "
            "tenth row of JSON lines, and the last tenth of a text; allowed: more text"
        )  # fmt: skip
    train, validation = tokenizer.ids(found.train), tokenizer.ids(found.validation)
    shortest = min(len(train), len(validation))
    if shortest <= seq_len:
        raise OptionError(
            "seq_len",
            f"{seq_len} given, but {name!r} has {len(train)} {tokenizer.unit}s for training and {len(validation)} for "
            f"validation; allowed: 1 to {shortest - 1}, or more text with --data",
        )
    return Corpus(train, validation, name, found.files, found.left_out, tokenizer.unit)


def read_documents(data: Sequence[str], text_field: str) -> Documents:
    """The documents of files and folders: a file of text is one, and so is each row of JSON lines."""
    left_out: list[str] = []
    files = dict.fromkeys(find_files(data, left_out))  # each once
    train: list[str] = []
    validation: list[str] = []
    for path in files:
        text = read(path)
        if path.suffix.lower() in JSON_LINES:
            for number, row in enumerate(rows(text, path, text_field), 1):
                (train if number % VALIDATION_SHARE else validation).append(row)
        else:
            cut = len(text) - len(text) // VALIDATION_SHARE
            train.append(text[:cut])
            validation.append(text[cut:])
    return Documents([*filter(None, train)], [*filter(None, validation)], len(files), left_out)


def rows(text: str, path: Path, field: str) -> Iterator[str]:
    """The texts of JSON lines. Raises OptionError, with the line, where there is none."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"line {number} of {str(path)!r}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise OptionError("data", f"{where} is no JSON: {error}; allowed: a JSON object in every line") from error
        if not isinstance(row, dict):
            raise OptionError("data", f"{where} is no object; allowed: a JSON object in every line")
        if not isinstance(found := row.get(field), str):
            allowed = ", ".join(name for name, value in row.items() if isinstance(value, str)) or "a field with a text"
            raise OptionError("text_field", f"{field!r} given, which is no text in {where}; allowed: {allowed}")
        try:
            found.encode()
        except UnicodeEncodeError as error:  # JSON can spell one, UTF-8 cannot
            raise OptionError("data", f"{where} has half a surrogate pair in {field!r}: {error.reason}") from error
        yield found


def read(path: Path) -> str:
    """The file's UTF-8 text, without a byte order mark. Raises OptionError for any other file."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise OptionError("data", f"{str(path)!r} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise OptionError(
            "data", f"{str(path)!r} given, whose byte {error.start} is no UTF-8; allowed: {CURE}"
        ) from error


def no_text(path: Path) -> str | None:
    """What a file is in place of text. A zero byte in its first 8 KiB is git's rule for a binary file."""
    if path.suffix.lower() in TABLES:
        return f"a {path.suffix} file"
    with path.open("rb") as file:
        head = file.read(8192)
    return "a binary file, or text that is not in UTF-8" if 0 in head else None


def find_files(data: Sequence[str], left_out: list[str]) -> Iterator[Path]:
    """The files that ``data`` names, in that order; without names Python's own library. Adds to ``left_out``.

    Raises OptionError for what cannot be read, and for a file that is named and is no text.
    """
    if not data:
        yield from standard_library_files()
    for name in data:
        path = Path(name)
        try:
            if path.is_dir():
                yield from files_of(path, left_out)
            elif not path.is_file():
                raise OptionError("data", f"{name!r} given, which is neither a file nor a folder")
            elif kind := no_text(path):
                raise OptionError("data", f"{name!r} given, {kind}; allowed: {CURE}")
            else:
                yield path.resolve()
        except OSError as error:
            raise OptionError("data", f"{name!r} given, which cannot be read: {error}") from error


def files_of(folder: Path, left_out: list[str]) -> Iterator[Path]:
    """The texts under a folder, sorted by path, without hidden ones. Links to folders are not followed."""

    def fail(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(parent, name) for name in sorted(names) if not name.startswith(".")):
            kind = no_text(path) if path.is_file() else "no file"
            if kind is None:
                yield path.resolve()
            else:
                left_out.append(f"{str(path)!r} ({kind})")


def standard_library_files() -> list[Path]:
    """The running Python's own .py files, sorted by path, without site-packages and without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return [
        path
        for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
        if left_out.isdisjoint(path.relative_to(root).parts[:-1])
    ]
