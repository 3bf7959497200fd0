"""Gradients that fully_shard copies to the host in the backward pass: a thread adds them up, or steps by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .dtensor.shards import is_dtensor, local

AHEAD = 2  # blocks whose gradients are on the host and wait for the thread: it sets the pace where it is the slower one
Hook = Callable[[Tensor], None]
_at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback  # as fully_shard does
_arrivals: Any = WeakIdKeyDictionary()  # by parameter: the Arrivals object that has its gradients


def arrivals_of(p: Tensor) -> Arrivals | None:
    """The object through which a parameter's gradients arrive on the host; None where autograd has them."""
    return _arrivals.get(p)


def wait_for_offloaded(p: Tensor) -> None:
    """In a parameter's hook: waits for the copy of its gradient, which ``fully_shard`` may have begun to the host."""
    if not is_dtensor(p):
        return
    device = p.device_mesh.device_type
    if local(p).device.type == "cpu" and device != "cpu":
        torch.get_device_module(device).current_stream().synchronize()  # fully_shard's, in which the hook is called


class Handle:
    """Removes a hook, as the handles of torch's hooks do."""

    def __init__(self, hooks: dict[Handle, Hook], hook: Hook) -> None:
        self.hooks = hooks
        hooks[self] = hook

    def remove(self) -> None:
        self.hooks.pop(self, None)


class Worker:
    """A thread, begun when it is first needed, that does one thing after the other.

    A wait that Ctrl-C interrupts is begun again at the next call.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._steps: list[Future[None]] = []

    def step(self, function: Callable[[Any], None], job: Any) -> None:
        """Begins ``function(job)``; waits until no more than ``AHEAD`` are left, so that their gradients are few."""
        wait(self._steps[-AHEAD - 1 : -AHEAD])
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "memkern-gradients")
        self._steps.append(self._executor.submit(function, job))

    def join(self) -> list[Future[None]]:
        """Waits for all, and returns them: their results may be errors."""
        wait(self._steps)
        steps, self._steps = self._steps, []
        return steps


class Arrivals:
    """The gradients of parameters that ``fully_shard(offload_policy=CPUOffloadPolicy())`` copies to the host.

    ``fully_shard`` begins a copy to pinned memory when a block's gradients are there, and waits for it at the end of
    ``backward()``. It waits at once, and the device with it, where a gradient is there already, or the parameter has a
    hook for its accumulated gradient. So gradients of former passes are held here while a pass brings new ones, and
    hooks are called from here, when the copy of a block was begun: what needs its values runs in the thread, after the
    copy. Adding a micro-batch's bf16 gradients takes 0.4 ns of a core per element; on the device they would take the
    memory of all gradients until the last micro-batch.

    Args:
        params: all parameters.
        record: an event of the stream in which the copies are; None, they are complete.

    Backward pass of a block: :meth:`hold`, then :meth:`arrived`. :meth:`finish` is called when ``backward()`` ends.
    """

    def __init__(self, params: Callable[[], Iterable[Tensor]], record: Callable[[], Any]) -> None:
        self._params, self._record = params, record
        self._worker = Worker()
        self._hooks: Any = WeakIdKeyDictionary()  # of parameters
        self._held: dict[Tensor, Tensor] = {}
        self._deferred: dict[Any, tuple[Callable[[Sequence[Tensor]], None], list[Tensor]]] = {}
        self._event: Any = None  # of the gradients whose hooks are called
        self._pending = False  # whether finish() is to be called

    def follow(self, params: Iterable[Tensor]) -> None:
        """Parameters whose gradients come through this object from now on."""
        for p in params:
            _arrivals[p] = self

    def register(self, p: Tensor, hook: Hook, waits: bool = True) -> Handle:
        """``hook(p)`` is called when p's gradient has come.

        waits: whether its copy must be complete by then. False: it was begun, and the hook may :meth:`defer` or
            :meth:`wait`.
        """

        def after(p: Tensor) -> None:
            self.wait()
            hook(p)

        return Handle(self._hooks.setdefault(p, {}), after if waits else hook)

    # ---- a backward pass

    def hold(self, params: Iterable[Tensor]) -> None:
        """Before the gradients of ``params`` are computed: takes those of former passes away."""
        if not self._pending:
            self._pending = True
            self._held.clear()  # of a pass that was interrupted
            _at_end_of_backward(self.finish)
        for p in params:
            if p.grad is not None and p not in self._held:
                self._held[p], p.grad = p.grad, None

    def arrived(self, params: Iterable[Tensor]) -> None:
        """After the copies of the gradients of ``params`` were begun."""
        came = [p for p in params if p.grad is not None]
        event = self._event = self._record()
        try:
            for p in came:
                hooks = self._hooks.get(p)
                for hook in [*hooks.values()] if hooks else ():
                    hook(p)
            for step, stepped in self._deferred.values():
                self._submit(step, [(p, self._taken(p)) for p in stepped], event)
        finally:
            self._event = None
            self._deferred.clear()
        added = [(p, self._taken(p)) for p in came if p in self._held and p.grad is not None]
        if added:
            self._worker.step(self._add, (added, event))

    def defer(self, owner: object, step: Callable[[Sequence[Tensor]], None], p: Tensor) -> None:
        """In a hook: ``step`` is called with p, and all others that came with it, in the thread, after their copies.

        It finds their gradients in ``grad``; they are freed then.
        """
        self._deferred.setdefault(id(owner), (step, []))[1].append(p)

    def wait(self) -> None:
        """In a hook: returns when the copy is complete."""
        if self._event is not None:
            self._event.synchronize()

    def finish(self) -> None:
        """The end of ``backward()``: waits for the thread, and raises what it raised. Then all gradients are there.

        What came without a notice, as the gradients of an embedding whose inputs need none, is treated here.
        """
        self._pending = False
        self._join()
        self.arrived(self._params())
        self._join()
        for p, total in self._held.items():
            p.grad = total
        self._held.clear()

    def _join(self) -> None:
        for done in self._worker.join():
            done.result()

    def reset(self) -> bool:
        """Before a forward pass: forgets a backward pass that was interrupted, and says whether there was one."""
        interrupted, self._pending = self._pending, False
        if interrupted:
            self._worker.join()
            self._held.clear()
        return interrupted

    # ---- the thread

    @staticmethod
    def _taken(p: Tensor) -> Tensor:
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
