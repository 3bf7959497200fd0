"""Receives the gradients that fully_shard copies to the host in the backward pass: a thread adds or steps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .dtensor.shards import is_dtensor, local

AHEAD = 2  # jobs, of one block's gradients each, that may wait for the thread; for more the backward pass waits
Hook = Callable[[Tensor], None]
_at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback  # which fully_shard uses, too
_arrivals: Any = WeakIdKeyDictionary()  # by parameter: the Arrivals object that receives its gradients


def arrivals_of(p: Tensor) -> Arrivals | None:
    """The object through which a parameter's gradients arrive on the host; None where autograd accumulates them."""
    return _arrivals.get(p)


def wait_for_offloaded(p: Tensor) -> None:
    """In a parameter's hook: waits for the copy of its gradient to the host, if ``fully_shard`` has begun one."""
    if not is_dtensor(p):
        return
    device = p.device_mesh.device_type
    if local(p).device.type == "cpu" and device != "cpu":
        torch.get_device_module(device).current_stream().synchronize()  # fully_shard's stream, in which hooks run


class Handle:
    """Removes a hook, as the handles of torch's hooks do."""

    def __init__(self, hooks: dict[Handle, Hook], hook: Hook) -> None:
        self.hooks = hooks
        hooks[self] = hook

    def remove(self) -> None:
        self.hooks.pop(self, None)


class Worker:
    """Runs jobs one after the other in a thread, which starts with the first job.

    After a wait that Ctrl-C has interrupted, the next call waits for the same jobs.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._futures: list[Future[None]] = []

    def step(self, function: Callable[[Any], None], job: Any) -> None:
        """Submits ``function(job)`` when no more than ``AHEAD`` jobs are left, so that few gradients wait."""
        wait(self._futures[-AHEAD - 1 : -AHEAD])
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "memkern-gradients")
        self._futures.append(self._executor.submit(function, job))

    def join(self) -> list[Future[None]]:
        """Waits for all jobs; returns their futures, which hold the errors that they raised."""
        wait(self._futures)
        futures, self._futures = self._futures, []
        return futures


class Arrivals:
    """The gradients of parameters that ``fully_shard(offload_policy=CPUOffloadPolicy())`` copies to the host.

    ``fully_shard`` begins a copy to pinned memory when a block's gradients are computed, and waits for it at the end of
    ``backward()``. Where a parameter has a gradient already, or a hook for its accumulated gradient, it waits at once,
    and the device with it. To avoid that, gradients of former passes are held here while a pass brings new ones, and
    hooks are called from here when the copy of a block was begun; work that needs the values runs in the thread, after
    the copy. Adding a micro-batch's bf16 gradients takes 0.4 ns of a core per element; on the device they would take
    the memory of all gradients until the last micro-batch.

    Args:
        params: returns all parameters.
        record: returns an event of the stream of copies, or None where copies are complete already.

    Backward pass of a block: :meth:`hold`, then :meth:`arrived`. :meth:`finish` is called when ``backward()`` ends.
    """

    def __init__(self, params: Callable[[], Iterable[Tensor]], record: Callable[[], Any]) -> None:
        self._params, self._record = params, record
        self._worker = Worker()
        self._hooks: Any = WeakIdKeyDictionary()  # by parameter: its hooks, by their handles
        self._held: dict[Tensor, Tensor] = {}  # by parameter: the sum of its gradients of former passes
        self._deferred: dict[Any, tuple[Callable[[Sequence[Tensor]], None], list[Tensor]]] = {}  # see defer()
        self._event: Any = None  # of the copy of the gradients whose hooks are being called
        self._pending = False  # whether a backward pass has begun and finish() has not been called

    def follow(self, params: Iterable[Tensor]) -> None:
        """Makes the gradients of ``params`` come through this object from now on."""
        for p in params:
            _arrivals[p] = self

    def register(self, p: Tensor, hook: Hook, waits: bool = True) -> Handle:
        """Has ``hook(p)`` called when p's gradient has come.

        waits: whether to call it after the copy is complete. False: when the copy was begun; the hook may then
            :meth:`defer` or :meth:`wait`.
        """

        def wait_and_call(p: Tensor) -> None:
            self.wait()
            hook(p)

        return Handle(self._hooks.setdefault(p, {}), wait_and_call if waits else hook)

    # ---- a backward pass

    def hold(self, params: Iterable[Tensor]) -> None:
        """Before the gradients of ``params`` are computed: moves those of former passes out of ``grad``."""
        if not self._pending:
            self._pending = True
            self._held.clear()  # what an interrupted pass has left
            _at_end_of_backward(self.finish)
        for p in params:
            if p.grad is not None and p not in self._held:
                self._held[p], p.grad = p.grad, None

    def arrived(self, params: Iterable[Tensor]) -> None:
        """After the copies of the gradients of ``params`` were begun: calls hooks, and has the thread use gradients."""
        with_grad = [p for p in params if p.grad is not None]
        event = self._event = self._record()
        try:
            for p in with_grad:
                hooks = self._hooks.get(p)
                for hook in [*hooks.values()] if hooks else ():
                    hook(p)
            for step, deferred in self._deferred.values():
                self._submit(step, [(p, self._taken(p)) for p in deferred], event)
        finally:
            self._event = None
            self._deferred.clear()
        added = [(p, self._taken(p)) for p in with_grad if p in self._held and p.grad is not None]
        if added:
            self._worker.step(self._add, (added, event))

    def defer(self, owner: object, step: Callable[[Sequence[Tensor]], None], p: Tensor) -> None:
        """In a hook: has the thread call ``step`` with p and the owner's other parameters of the block, after the copy.

        ``step`` finds the gradients in ``grad``; they are freed after it.
        """
        self._deferred.setdefault(id(owner), (step, []))[1].append(p)

    def wait(self) -> None:
        """In a hook: returns when the copy is complete."""
        if self._event is not None:
            self._event.synchronize()

    def finish(self) -> None:
        """At the end of ``backward()``: waits for the thread, raises its errors, and leaves the sums in ``grad``.

        Takes gradients for which :meth:`arrived` was not called, such as those of an embedding, whose inputs need none.
        """
        self._pending = False
        self._join()
        self.arrived(self._params())
        self._join()
        for p, total in self._held.items():
            p.grad = total
        self._held.clear()

    def _join(self) -> None:
        for future in self._worker.join():
            future.result()

    def reset(self) -> bool:
        """Before a forward pass: forgets a backward pass that was interrupted; returns whether there was one."""
        interrupted, self._pending = self._pending, False
        if interrupted:
            self._worker.join()
            self._held.clear()
        return interrupted

    # ---- the thread

    @staticmethod
    def _taken(p: Tensor) -> Tensor:  # p's gradient, taken out of p
        grad, p.grad = p.grad, None
        assert grad is not None
        return grad

    def _submit(
        self, step: Callable[[Sequence[Tensor]], None], pairs: Sequence[tuple[Tensor, Tensor]], event: Any
    ) -> None:
        def run(_: Any) -> None:
            if event is not None:
                event.synchronize()
            for p, grad in pairs:
                p.grad = grad
            try:
                step([p for p, _ in pairs])
            finally:
                for p, _ in pairs:
                    p.grad = None

        self._worker.step(run, None)

    @torch.no_grad()
    def _add(self, job: tuple[Sequence[tuple[Tensor, Tensor]], Any]) -> None:
        added, event = job
        if event is not None:
            event.synchronize()
        for p, grad in added:
            local(self._held[p]).add_(local(grad))
