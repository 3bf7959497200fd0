"""Gradients of several micro-batches, added up in bf16 with stochastic rounding."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ..quant.layout import is_dense, layout_of, memory_order
from ..reference.blockwise import weight_random
from ..reference.weights import split_weight

BLOCK = 128  # positions with random bits of their own
BITS = 16  # that bf16 drops


@torch.no_grad()
def add_stochastic_(total: Tensor, x: Tensor, step: int) -> None:
    """total = total + x in fp32, rounded to bf16 with the random bits of ``step``: without bias."""
    layout = layout_of(total, BLOCK)
    if layout.numel == 0:
        return
    added = total.float() + x  # in memory as total is
    r = weight_random(layout.block, step, BITS, total.device)
    r = r.repeat(layout.blocks_per_segment)[: layout.segment]
    rounded, _ = split_weight(memory_order(added).view(-1, layout.segment), r, BITS)
    memory_order(total).copy_(rounded.view(-1))


class Accumulation:
    """What :func:`accumulate` returns: ``remove()`` ends it, as does leaving a ``with`` block."""

    def __init__(self, params: list[Tensor]) -> None:
        self._handles: list[Any] = []
        self._nodes: list[Any] = []  # a parameter holds its own but weakly
        for p in params:
            self._add(p)

    def _add(self, p: Tensor) -> None:
        node = get_gradient_edge(p).node
        earlier: list[Tensor] = []  # the sum while autograd stores this micro-batch's gradient
        count = 0

        def before(_: Any) -> None:
            if (
                p.grad is not None
                and p.grad.dtype == torch.bfloat16
                and is_dense(p.grad.shape, p.grad.stride())
            ):
                earlier[:] = [p.grad]
                p.grad = None

        def after(p: Tensor) -> None:
            nonlocal count
            if earlier and p.grad is not None:
                total = earlier.pop()
                count += 1
                add_stochastic_(total, p.grad, count)
                p.grad = total

        self._nodes.append(node)
        self._handles.append(node.register_prehook(before))
        self._handles.append(p.register_post_accumulate_grad_hook(after))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()

    def __enter__(self) -> Accumulation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def accumulate(model: nn.Module) -> Accumulation:
    """From here on, ``backward()`` adds to the bf16 gradients of a model with stochastic rounding.

    ::

        p.grad = round(p.grad + g)          in fp32; up or down to a neighbouring bf16 with the probability of its nearness

    To the nearest, a sum that has grown to 256 times a micro-batch's gradient no longer changes. The random bits come
    from the position in blocks of 128 and a count of the additions, so runs repeat. ``zero_grad`` and optimizers need
    not know of it; the first gradient after ``zero_grad()`` is taken as it is.

    Args:
        model: its bf16 parameters that require a gradient; others add as before. Not for gradients that a wrapper
            adds up in buffers of its own (DistributedDataParallel, fully_shard).

    Returns:
        A handle: ``remove()`` ends it, and it is a context manager.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: the model has no bf16 parameter that requires a gradient.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    params: list[Tensor] = [p for p in model.parameters() if p.requires_grad and p.dtype == torch.bfloat16]
    if not params:
        raise ValueError(
            "model has no bfloat16 parameter that requires a gradient; others need no such rounding"
        )
    return Accumulation(params)
