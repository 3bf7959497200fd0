"""Text as bytes: which files, a uint8 tensor for training, one for validation, and the batches of a step."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from .config import ArgumentError

VALIDATION_SHARE = 10  # one byte in ten: the tail of every file
SNIFF = 8192


@dataclasses.dataclass(frozen=True)
class Corpus:
    """``train`` and ``validation``: uint8, 1-D, on the CPU. ``digest`` identifies the two."""

    train: Tensor
    validation: Tensor
    name: str
    files: int
    digest: str


def standard_library_files() -> list[Path]:
    """The running Python's own .py files, sorted by path, without site-packages and without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return [
        path
        for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
        if left_out.isdisjoint(path.relative_to(root).parts[:-1])
    ]


def text_files(folder: Path) -> Iterator[Path]:
    """Text files under ``folder``, sorted by path.

    Left out: what is hidden, links to folders, and binary files (git's rule: a zero byte in the first 8 KiB).
    """
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            if name.startswith(".") or not path.is_file():
                continue
            with path.open("rb") as file:
                if 0 not in file.read(SNIFF):
                    yield path


def _raise(error: OSError) -> None:
    raise error


def find_files(data: Sequence[str]) -> list[Path]:
    """The files that ``data`` names, each once, in that order. Files given by name are taken as they are."""
    if not data:
        return standard_library_files()
    files: dict[Path, None] = {}
    for name in data:
        path = Path(name)
        try:
            if path.is_dir():
                files.update((file.resolve(), None) for file in text_files(path))
            elif path.is_file():
                files[path.resolve()] = None
            else:
                raise ArgumentError("data", f"{name!r} given, which is neither a file nor a folder")
        except OSError as error:
            raise ArgumentError("data", f"{name!r} given, which cannot be read: {error}") from error
    return list(files)


def load_corpus(data: Sequence[str] = (), *, seq_len: int) -> Corpus:
    """Reads files and folders whole into memory; the last tenth of every file's bytes is for validation.

    Empty ``data``: ``standard_library_files()``. Raises ArgumentError where nothing can be read, or where training or
    validation text is too short for one window of seq_len + 1 bytes.
    """
    files = find_files(data)
    name = " ".join(data) if data else f"Python {sysconfig.get_python_version()} standard library"
    train, validation = bytearray(), bytearray()
    for path in files:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ArgumentError("data", f"{str(path)!r} cannot be read: {error}") from error
        cut = len(content) - len(content) // VALIDATION_SHARE
        train += content[:cut]
        validation += content[cut:]
    if not train:
        raise ArgumentError("data", f"{name!r} given, which holds no text; allowed: files or folders of text")
    shortest = min(len(train), len(validation))
    if shortest < seq_len + 1:
        raise ArgumentError(
            "seq_len",
            f"{seq_len} given, but {name!r} has {len(train)} bytes for training and {len(validation)} for "
            f"validation; allowed: 1 to {shortest - 1}, or more text with --data"
            if shortest > 1
            else f"{seq_len} given, but {name!r} has {len(train) + len(validation)} bytes in all; "
            "allowed: more text with --data",
        )
    digest = hashlib.blake2b(train, digest_size=16)
    digest.update(len(train).to_bytes(8, "little"))
    digest.update(validation)
    return Corpus(
        train=torch.frombuffer(train, dtype=torch.uint8),
        validation=torch.frombuffer(validation, dtype=torch.uint8),
        name=name,
        files=len(files),
        digest=digest.hexdigest(),
    )


def windows(text: Tensor, starts: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 of shape (len(starts), seq_len): the targets are the inputs' next bytes."""
    taken = text[starts[:, None] + torch.arange(seq_len + 1)].long()
    return taken[:, :-1], taken[:, 1:]


def step_batches(
    text: Tensor, *, seed: int, step: int, accumulate: int, batch_size: int, seq_len: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The micro-batches of one step, which depend on nothing but (seed, step) and are drawn together.

    So a resumed run needs no state of the data, and k micro-batches of b windows hold what one of k*b holds.
    """
    mixed = hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(mixed, "little"))
    starts = torch.randint(len(text) - seq_len, (accumulate * batch_size,), generator=generator)
    for micro in starts.split(batch_size):
        yield windows(text, micro, seq_len)


def validation_batches(
    text: Tensor, *, tokens: int, batch_size: int, seq_len: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """At most tokens // seq_len windows (at least one), evenly spread and apart: always the same ones."""
    available = (len(text) - 1) // seq_len
    count = max(1, min(tokens // seq_len, available))
    starts = torch.arange(count) * available // count * seq_len
    for some in starts.split(batch_size):
        yield windows(text, some, seq_len)
