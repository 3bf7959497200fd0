"""Returns freed memory of glibc's heap to the system, so that the resident set is what tensors need."""

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
    """Makes glibc map each block of 64 KiB or more by itself from here on, and unmap it when it is freed.

    By default glibc raises this threshold up to 32 MiB as large blocks are freed, and keeps freed blocks below it: most
    activations of a training step. No effect on other systems.
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
