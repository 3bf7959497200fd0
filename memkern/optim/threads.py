"""Sets the threads of a step on the CPU, where a launcher has given each process of a machine one thread."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator

import torch


@functools.cache
def of_a_step(current: int) -> int:
    """How many threads a step on the CPU uses, where torch uses ``current``.

    ``MEMKERN_STEP_THREADS``, if set. Else under torchrun, which sets OMP_NUM_THREADS=1 for several processes, this
    process's share of the launcher's cores, and no more than its own affinity has. Else ``current``.

    Raises:
        ValueError: MEMKERN_STEP_THREADS is no whole number above 0.
    """
    setting = os.environ.get("MEMKERN_STEP_THREADS")
    if setting is not None:
        if not (setting.isascii() and setting.isdigit() and int(setting)):
            raise ValueError(f"MEMKERN_STEP_THREADS must be a whole number above 0, got {setting!r}")
        return int(setting)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    if current != 1 or os.environ.get("OMP_NUM_THREADS") != "1" or not ranks.isdigit():
        return current
    try:
        own_cores, launcher_cores = os.sched_getaffinity(0), os.sched_getaffinity(os.getppid())
    except (AttributeError, OSError):  # no Linux, or a launcher that has ended
        return current
    return max(1, min(len(own_cores), len(launcher_cores | own_cores) // max(1, int(ranks))))


MANY = 8  # cores; with fewer, a step that uses one of them is worth no warning


@functools.cache
def warn_of_one_core() -> None:
    """Warns, once, where the CPU steps a device's weights on one of its many cores, and nobody has asked for that."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    is_chosen = "MEMKERN_STEP_THREADS" in os.environ or "LOCAL_WORLD_SIZE" in os.environ
    if cores >= MANY and not is_chosen and of_a_step(torch.get_num_threads()) == 1:
        warnings.warn(
            f"a step on the CPU computes on one of {cores} cores, as torch has one thread (OMP_NUM_THREADS is "
            f"{os.environ.get('OMP_NUM_THREADS', 'not set')}): set MEMKERN_STEP_THREADS to this process's share",
            stacklevel=2,
        )


@contextlib.contextmanager
def for_a_step() -> Iterator[None]:
    """A ``with`` block in which torch computes with :func:`of_a_step` threads."""
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
