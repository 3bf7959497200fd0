"""What the hooks in C++ (memkern._saved) are built for. setup.py runs this file by itself: it imports no memkern."""

from __future__ import annotations

import hashlib
from pathlib import Path

LEAST_TORCH = (2, 13)
"""From which nodes of the graph are held as the extension reads them."""


def too_old(torch_version: str) -> str | None:
    """Why the extension cannot be built for a version of torch, or None."""
    if tuple(map(int, torch_version.split(".")[:2])) >= LEAST_TORCH:
        return None
    return "memkern._saved needs torch {}.{} or newer".format(*LEAST_TORCH)


def sources_hash(folder: Path) -> str:
    """Of the Python files of a folder: those of memkern/saved, whose rules the extension follows."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def stamp(memkern_version: str, torch_version: str, torch_commit: str | None) -> str:
    """The versions that an extension is for: memkern, its sources, torch, torch's commit."""
    return f"{memkern_version}/{sources_hash(Path(__file__).parent)}/{torch_version}/{torch_commit}"
