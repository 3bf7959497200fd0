"""Builds that tests share: made once for the sources as they are, for all workers and later runs of pytest.

``build/test-cache`` holds the newest of each kind. Two processes that want the same one wait for each other.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "test-cache"
# All files that compilers read, and those from which headers are generated.
SOURCES = (
    "csrc/**/*",
    "tests/support/simt/**/*",
    "lab/emulators/fakegpu/*.*",
    "memkern/quant/codec.py",
    "memkern/schemas.py",
    "setup.py",
)


def key_of(*facts: object) -> str:
    """A hash of every file of SOURCES, torch's version, and the facts, such as compiler flags."""
    digest = hashlib.sha256(repr((torch.__version__, *facts)).encode())
    for path in sorted({path for pattern in SOURCES for path in ROOT.glob(pattern) if path.is_file()}):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def built(name: str, build: Callable[[Path], object], *facts: object) -> Path:
    """The folder that ``build`` filled, now or earlier."""
    folder = FOLDER / name / key_of(*facts)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            for old in folder.parent.iterdir():
                if old.is_dir():  # of other sources, or of a run that was ended
                    shutil.rmtree(old)
            unfinished = folder.parent / "unfinished"
            unfinished.mkdir()
            build(unfinished)
            unfinished.rename(folder)
    return folder
