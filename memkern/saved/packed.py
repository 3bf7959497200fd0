"""The objects that autograd holds in place of saved tensors, and when it unpacks each for the last time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch import Tensor
from torch.autograd import graph

from ..quant.layout import is_dense
from .built import now
from .evaluation import evaluate
from .saved_value import Value
from .undecided import Waiting


class _Used(Value):
    """In place of a value whose last user has run, in a backward pass that keeps no graph."""

    def fresh(self) -> bool:
        return False

    def tensor(self, of: Callable[[Value], Tensor]) -> Tensor:
        raise RuntimeError(
            "Trying to backward through the graph a second time; specify retain_graph=True the first time"
        )


USED = _Used()


ENGINE = graph._engine_run_backward.__code__
_OWN = 3  # references to a node that nobody holds: the engine's, the variable's and that of getrefcount's argument


def is_last_use(frame: FrameType | None) -> bool:
    """Whether one of torch's own nodes asks in its backward pass, which does so once, and the graph is freed then.

    frame: of the Python function that runs: the one that has started the engine, or none on a device's thread. A hook
    that looks at what a node has saved is another. A hook after the node may look, too, if somebody holds the node.
    C++ functions of others may ask more than once.
    """
    if frame is not None and frame.f_code is not ENGINE:
        return False
    node = torch._C._current_autograd_node()
    return (
        node is not None
        and sys.getrefcount(node) <= _OWN
        and type(node).__name__ == node.name().rpartition("::")[2]
        and torch._C._current_graph_task_id() != -1
        and not torch._C._autograd._get_current_graph_task_keep_graph()
    )


class Packed:
    """The object that autograd holds in place of a tensor."""

    __slots__ = ("__weakref__", "dtype", "stride", "time", "value")

    def __init__(self, value: Value, x: Tensor, plain: bool = True) -> None:
        value.uses += 1
        self.value, self.dtype, self.time = value, x.dtype, now()
        self.stride = x.stride() if plain and (x.is_contiguous() or is_dense(x.shape, x.stride())) else None

    def tensor(self, is_last: bool = False) -> Tensor:
        """is_last: whether nothing asks again (:func:`is_last_use`)."""
        x = evaluate(self.value)
        if is_last and not isinstance(self.value, Waiting):
            self.value = USED  # frees codes before the operation allocates gradients, torch when it is done
        return self.fitted(x)

    def fitted(self, x: Tensor) -> Tensor:
        """A value's tensor in the dtype and with the strides of the one that was packed."""
        if x.dtype != self.dtype:
            x = x.to(self.dtype)
        if self.stride is None or x.stride() == self.stride:
            return x
        return torch.empty_strided(x.shape, self.stride, dtype=x.dtype, device=x.device).copy_(x)
