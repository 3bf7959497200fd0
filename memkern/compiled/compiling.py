"""``memkern.compile``: torch.compile, and what the compiled model saves for its backward pass by memkern's rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def compile(
    model: Callable[..., Any],
    *,
    saved_bits: int | str = "exact",
    memory_budget: float | int | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """``torch.compile(model, ...)`` whose backward pass needs less memory.

    saved_bits: ``"exact"``: torch's min-cut, which may compute elementwise operations again where torch keeps a copy of
        their result for a product; no value is rounded. ``8``: what may stand in 8-bit codes does, by the rules of
        :func:`memkern.compress`, where nothing can be asked of the data, as on a GPU (docs/saved-tensors.md).
    memory_budget: how much each graph may save: a float in (0, 1], a share of what torch.compile saves of what is
        computed, without the outputs; or an int, bytes. Of these it does the first that is enough: what torch.compile
        does; elementwise operations computed again; with ``saved_bits=8`` as many values in codes as it takes; with
        ``"exact"`` products and attention computed again, while that lowers the peak. A warning names what is saved
        where nothing is enough.
    options: of :func:`torch.compile`, but for ``backend``, which is Inductor.

    Raises ValueError for other bits, budgets or a backend, RuntimeError where torch's Inductor takes no partitioner.
    """
    from . import torch_internals
    from .partitioner import Partitioner

    torch_internals.check()
    partitioner = Partitioner(saved_bits, memory_budget)
    if options.pop("backend", "inductor") != "inductor":
        raise ValueError("memkern.compile has Inductor as its backend; for others, use torch.compile")
    given = dict(options.pop("options", None) or {})
    if (mode := options.pop("mode", None)) is not None:
        given = {**torch_internals.list_mode_options(mode), **given}  # torch takes a mode or options
    return torch.compile(model, options={**given, "custom_partitioner_fn": partitioner}, **options)
