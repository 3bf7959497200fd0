"""The compiled library: its file, and where torch.ops has its ops.

tools/hub_kernel.py writes another one for a build whose names must differ from those of every other build.
"""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).with_name("libmemkern.so")
NAMESPACE = "memkern"

PACKAGE = __name__.rpartition(".")[0]
"""memkern, or what the loader of such a build has named it."""


def is_own(cls: type) -> bool:
    """Whether a class is one of memkern's."""
    return cls.__module__.startswith(f"{PACKAGE}.")
