"""Processes for tests of several ranks: started once a session, with a new process group (gloo) for each call.

They are forked from a server that has imported torch once, so that a process costs milliseconds instead of seconds.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120.0  # how long a call may take
TORCHRUN_TWO = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def _packed(x: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    return buffer.getvalue()


def _serve(calls: Connection) -> None:
    """Runs calls until None comes. A call is (function, arguments, rank, number of ranks, file for the rendezvous)."""
    torch.set_num_threads(1)
    while (call := calls.recv()) is not None:
        run, args, rank, world, path = call
        try:
            torch.manual_seed(0)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{path}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=60),
            )
            result = run(*args)
            dist.barrier()
            calls.send((True, _packed(result)))
        except BaseException:
            calls.send((False, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


class Ranks:
    """Calls functions on several processes at a time, each a rank of one process group."""

    def __init__(self) -> None:
        self._context: Any = multiprocessing.get_context("forkserver")
        modules = ["torch.distributed.fsdp", "torch.distributed.checkpoint", "memkern.optim", "memkern._ops"]
        self._context.set_forkserver_preload(["torch", *modules])
        self._started: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="memkern-ranks-")
        self._calls = 0

    def __call__(self, world: int, run: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs ``run(*args)`` in ``world`` processes. Returns the results by rank.

        ``run`` is a function at the top of a module. AssertionError with a rank's traceback where one fails.
        """
        while len(self._started) < world:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._started.append((process, ours))
        self._calls += 1
        path = str(Path(self._folder.name) / str(self._calls))
        for rank, (_, pipe) in enumerate(self._started[:world]):
            pipe.send((run, args, rank, world, path))
        results, failures = [], []
        for rank, (_, pipe) in enumerate(self._started[:world]):
            try:
                succeeded, result = pipe.recv() if pipe.poll(TIMEOUT_S) else (False, f"no answer in {TIMEOUT_S:.0f} s")
            except EOFError:
                succeeded, result = False, "the process ended"
            if succeeded:
                results.append(torch.load(io.BytesIO(result), weights_only=False))
            else:
                failures.append(f"rank {rank} of {world}: {result}")
        if failures:
            self.close()  # other ranks may still wait for the rank that failed
        assert not failures, "\n".join(failures)
        return results

    def close(self) -> None:
        for process, pipe in self._started:
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(2)
            if process.is_alive():
                process.kill()
            pipe.close()
        self._started = []
