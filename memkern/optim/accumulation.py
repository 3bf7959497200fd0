"""Gradients of several micro-batches, added up in bf16 with stochastic rounding."""

from __future__ import annotations

import sys
import warnings
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ..quant.codec import WEIGHTS
from ..quant.layout import is_dense, laid_out_alike, layout_of, memory_order, same_layout
from ..reference.blockwise import to_blocks
from ..reference.weights import load_weight, store_weight

BLOCK = 128  # positions with random bits of their own
PIECE = 2**20  # elements
ERROR_DTYPE = {"stochastic": None, "bf16+8": torch.int8, "bf16+16": torch.int16}
"""Values of ``storage``, and the dtype of the error that each keeps."""


@torch.no_grad()
def add_(total: Tensor, x: Tensor, storage: str, step: int, error: Tensor | None = None) -> None:
    """total = total + x in fp32, stored in bf16 as a step stores weights (``memkern.quant.codec.WEIGHTS``).

    About PIECE elements at a time, so that what is computed in fp32 takes little beside the gradients.
    """
    whole = layout_of(total, BLOCK)
    (x,) = laid_out_alike([x], [total])
    total, x = memory_order(total), memory_order(x)
    error = None if error is None else memory_order(error)
    unit = whole.segment if whole.segment < whole.numel else whole.block
    if not whole.numel:
        return
    size = max(PIECE // unit, 1) * unit  # whole blocks, so that each has the same random bits
    for start in range(0, whole.numel, size):
        piece = slice(start, start + size)
        of_total, of_error = total[piece], None if error is None else error[piece]
        count = len(of_total)
        layout = whole._replace(numel=count, segment=min(whole.segment, count), scale_shape=())
        added = load_weight(of_total, of_error, WEIGHTS[storage], layout) + to_blocks(x[piece], layout)
        store_weight(added, of_total, of_error, WEIGHTS[storage], layout, step)


class _Sum:
    """The gradient of one parameter while it is added up."""

    def __init__(self, storage: str) -> None:
        self.storage, self.count, self.used = storage, 0, False
        self.total: Tensor | None = None  # held while autograd stores a micro-batch's gradient
        self.error: Tensor | None = None  # of the total; it stays valid if others write the total

    def hold(self, p: Tensor) -> None:
        self.used = True
        g = p.grad
        if g is not None and g.dtype == torch.bfloat16 and is_dense(g.shape, g.stride()):
            self.total, p.grad = g, None

    def add(self, p: Tensor) -> None:
        total, x = self.total, p.grad
        self.total = None
        if total is None:  # a new sum
            self.error = None
            return
        p.grad = total
        if x is None:
            return
        dtype = ERROR_DTYPE[self.storage]
        if dtype is not None and (self.error is None or not same_layout(self.error, total)):
            self.error = torch.zeros_like(total, dtype=dtype)
        self.count += 1
        add_(total, x, self.storage, self.count, self.error)


_active: WeakSet[Accumulation] = WeakSet()
"""The handles that live and were not removed."""
_counts: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""The additions of a model so far: each ``with`` block goes on where the one before has ended."""


def is_active(p: Tensor) -> bool:
    """Whether a handle adds up the gradients of this parameter."""
    return any(id(p) in handle.ids for handle in _active)


class Accumulation:
    """The handle that :func:`accumulate` returns: ``remove()`` ends it, as does leaving a ``with`` block.

    ``restart(count)`` sets the count of additions.
    """

    def __init__(self, model: nn.Module, params: list[Tensor], storage: str) -> None:
        self._model, self._params = model, params
        self._handles: list[Any] = []
        self._nodes: list[Any] = []  # kept alive here: a parameter holds its node weakly
        self._sums = [_Sum(storage) for _ in params]
        self.restart(_counts.get(model, 0))
        for p, one in zip(params, self._sums, strict=True):
            self._add(p, one)
        self.ids = {*map(id, params)}  # valid while self._params holds them
        _active.add(self)

    def _add(self, p: Tensor, one: _Sum) -> None:
        node = get_gradient_edge(p).node
        self._nodes.append(node)
        self._handles.append(node.register_prehook(lambda _: one.hold(p)))
        # Not the tensor's own hook: after one was removed, torch.utils.swap_tensors leaves it without any for good.
        self._handles.append(node.register_hook(lambda *_: one.add(p)))

    def restart(self, count: int) -> None:
        """Sets the count of additions, from which the random bits come: a loop that goes on repeats every bit."""
        for one in self._sums:
            one.count = count

    def remove(self) -> None:
        if self._handles:
            _counts[self._model] = max(one.count for one in self._sums)
            _active.discard(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()

    def __del__(self) -> None:
        # Autograd holds a parameter's node, and the hooks on it, only as long as this handle does.
        if (
            getattr(self, "_sums", ())
            and self._handles
            and not any(one.used for one in self._sums)
            and not sys.is_finalizing()
        ):
            warnings.warn(
                "the handle of accumulate() was dropped before it added up any gradient: keep it, as in "
                "handle = accumulate(model), for as long as gradients are to be added up",
                stacklevel=2,
            )

    def __enter__(self) -> Accumulation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def accumulate(model: nn.Module, storage: str = "stochastic") -> Accumulation:
    """From here on, ``backward()`` adds to the bf16 gradients of a model without losing what is small.

    ::

        p.grad = round(p.grad + g)    in fp32; up or down to a neighbouring bf16 with the probability of its nearness

    To the nearest, a sum that has grown to 256 times a micro-batch's gradient no longer changes. The random bits come
    from the position in blocks of 128 and a count of the model's additions, which goes on from one handle to the next,
    so runs repeat. ``zero_grad`` and optimizers need not know of it; the first gradient after ``zero_grad()`` is taken
    as it is, and a sum that something else changes (clipping) goes on from there, with its error relative to it.

    Args:
        model: its bf16 parameters that require a gradient; others add as before. Not for gradients that a wrapper
            adds up in buffers of its own (DistributedDataParallel, fully_shard; HostOffload with offload_gradients
            raises).
        storage: "stochastic" keeps nothing, and is right on the average; "bf16+8" and "bf16+16" keep the sum's rounding
            error too, in 1 or 2 bytes per parameter: sums of 24 or 32 bits (``master_weights`` has the same names).

    Returns:
        A handle, to be kept: gradients are added up as long as it lives. ``remove()`` ends it, and it is a context
        manager.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: another ``storage``; the model has no bf16 parameter that requires a gradient.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if storage not in ERROR_DTYPE:
        raise ValueError(f"storage must be one of {', '.join(map(repr, ERROR_DTYPE))}, got {storage!r}")
    params: list[Tensor] = [p for p in model.parameters() if p.requires_grad and p.dtype == torch.bfloat16]
    if not params:
        raise ValueError("model has no bfloat16 parameter that requires a gradient; others need no such rounding")
    return Accumulation(model, params, storage)
