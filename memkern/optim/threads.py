"""Decides how many threads a step on the CPU uses: more than torch's one where a launcher such as torchrun set that."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator

import torch


@functools.cache
def step_threads(current: int) -> int:
    """How many threads a step on the CPU uses, where torch uses ``current``.

    ``MEMKERN_STEP_THREADS``, if that is set. Else, under torchrun, which sets OMP_NUM_THREADS=1 where it starts several
    processes, this process's share of the launcher's cores, but no more cores than this process may use. Else
    ``current``.

    Raises:
        ValueError: MEMKERN_STEP_THREADS is no whole number above 0.
    """
    setting = os.environ.get("MEMKERN_STEP_THREADS")
    if setting is not None:
        if not (setting.isascii() and setting.isdigit() and int(setting)):
            raise ValueError(f"MEMKERN_STEP_THREADS must be a whole number above 0, got {setting!r}")
        return int(setting)
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    if current != 1 or os.environ.get("OMP_NUM_THREADS") != "1" or not processes.isdigit():
        return current
    try:
        own_cores, launcher_cores = os.sched_getaffinity(0), os.sched_getaffinity(os.getppid())
    except (AttributeError, OSError):  # no Linux, or a launcher that has ended
        return current
    return max(1, min(len(own_cores), len(launcher_cores | own_cores) // max(1, int(processes))))


MANY = 8  # cores, of which a step should use more than one


@functools.cache
def warn_of_one_core() -> None:
    """Warns, once, where a step on the CPU would use one of ``MANY`` cores or more, and nobody has asked for that."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    is_chosen = "MEMKERN_STEP_THREADS" in os.environ or "LOCAL_WORLD_SIZE" in os.environ
    if cores >= MANY and not is_chosen and step_threads(torch.get_num_threads()) == 1:
        warnings.warn(
            f"a step on the CPU computes on one of {cores} cores, as torch has one thread (OMP_NUM_THREADS is "
            f"{os.environ.get('OMP_NUM_THREADS', 'not set')}): set MEMKERN_STEP_THREADS to this process's share",
            stacklevel=2,
        )


@contextlib.contextmanager
def with_step_threads() -> Iterator[None]:
    """A ``with`` block in which torch uses as many threads as :func:`step_threads` says."""
    before = torch.get_num_threads()
    threads = step_threads(before)
    if threads == before:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
