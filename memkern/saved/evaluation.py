"""Computes the tensors that autograd asks for in a backward pass, and caches those that it will ask for again."""

from __future__ import annotations

import weakref
from collections import OrderedDict

import torch
from torch import Tensor

from .saved_value import Value, spared
from .storage import check_present

MOST_CACHED = 8


class _Pass:
    """The tensors of one backward pass that will be asked for again.

    Calling it gives the tensor of a value. It is passed on to :meth:`Value.tensor` in place of a function that refers
    to itself: that would be a reference cycle, which keeps the tensors until the garbage collector runs.
    """

    def __init__(self) -> None:
        self.cached: OrderedDict[Value, tuple[Tensor, int]] = OrderedDict()  # with the tensor's version

    def __call__(self, value: Value) -> Tensor:
        value.uses -= 1
        x, version = self.cached.get(value, (None, 0))
        if x is None or x._version != version:
            x = value.tensor(self)
        check_present(x)
        if value.uses <= 0:
            self.cached.pop(value, None)
        elif value.is_work() and (not value.lossy or self._is_worth(x)):
            self.cached[value] = x, x._version
            if len(self.cached) > MOST_CACHED:
                self.cached.popitem(last=False)
        return x

    def _is_worth(self, x: Tensor) -> bool:
        """Whether codes save so much now that caching x keeps the peak below torch's."""
        return spared() >= sum(y.nbytes for y, _ in self.cached.values()) + 2 * x.nbytes

    def end(self) -> None:
        self.cached.clear()


_passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()


def _pass() -> _Pass:
    """Of the backward pass that runs in this thread; outside of one, of this call."""
    task = torch._C._current_graph_task_id()
    found = _passes.get(task)
    if found is None:
        found = _Pass()
        if task != -1:
            _passes[task] = found
            # The engine owns the callback, and the callback the tensors: also a pass that raises frees them.
            torch.autograd.Variable._execution_engine.queue_callback(found.end)
    return found


def evaluate(value: Value) -> Tensor:
    """The tensor of a value that autograd asks for."""
    if value.is_at_hand():  # nothing to compute, and nothing to cache
        value.uses -= 1
        x = value.tensor(evaluate)
        check_present(x)
        return x
    current = _pass()
    try:
        return current(value)
    except BaseException:
        current.end()  # the traceback holds this frame, and with it the tensors, for as long as the caller likes
        raise
