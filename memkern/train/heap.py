"""glibc's heap: memory that is freed goes back to the system, so that the resident set is what tensors need."""

from __future__ import annotations

import ctypes
import gc
import sys

M_MMAP_THRESHOLD = -3  # of malloc.h
THRESHOLD = 65536  # bytes


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def map_large_blocks() -> None:
    """From here on blocks of 64 KiB and more are mappings of their own, which are returned when they are freed.

    Without this glibc raises the bound up to 32 MiB as such blocks are freed, and keeps smaller ones for later: of a
    training step's activations most. No effect on other systems.
    """
    library = _glibc()
    if library is not None:
        library.mallopt(M_MMAP_THRESHOLD, THRESHOLD)


def trim() -> None:
    """Returns what is free now, cycles of Python objects included."""
    gc.collect()
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)
