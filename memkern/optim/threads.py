"""Threads of a step on the CPU, where a launcher has given each of a machine's processes one."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator

import torch


@functools.cache
def of_a_step(current: int) -> int:
    """How many threads a step on the CPU uses, where torch uses ``current``.

    ``MEMKERN_STEP_THREADS``; else under torchrun, which sets OMP_NUM_THREADS=1 where it starts several processes, this
    one's share of the launcher's cores, and no more than its own affinity has. Other numbers stay.

    Raises:
        ValueError: MEMKERN_STEP_THREADS is no whole number above 0.
    """
    given = os.environ.get("MEMKERN_STEP_THREADS")
    if given is not None:
        if not (given.isascii() and given.isdigit() and int(given)):
            raise ValueError(f"MEMKERN_STEP_THREADS must be a whole number above 0, got {given!r}")
        return int(given)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    if current != 1 or os.environ.get("OMP_NUM_THREADS") != "1" or not ranks.isdigit():
        return current
    try:
        own, launchers = os.sched_getaffinity(0), os.sched_getaffinity(os.getppid())
    except (AttributeError, OSError):  # no Linux, or a launcher that has ended
        return current
    return max(1, min(len(own), len(launchers | own) // max(1, int(ranks))))


@contextlib.contextmanager
def for_a_step() -> Iterator[None]:
    """Inside, torch computes with :func:`of_a_step` threads."""
    before = torch.get_num_threads()
    threads = of_a_step(before)
    if threads == before:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
