"""Finds the classes of memkern.optim by name (``adamw8bit``), for the adapters of this package."""

from __future__ import annotations

from .. import optim
from ..optim.base import BlockwiseOptimizer


def optimizers() -> dict[str, type[BlockwiseOptimizer]]:
    """The optimizers' classes by name: ``adamw8bit`` is ``memkern.optim.AdamW8bit``."""
    classes = (getattr(optim, name) for name in optim.__all__)
    return {
        cls.__name__.lower(): cls
        for cls in classes
        if isinstance(cls, type) and issubclass(cls, BlockwiseOptimizer)  # not the wrappers
    }


def optimizer(name: str) -> type[BlockwiseOptimizer]:
    """The class of that name.

    Raises:
        ValueError: there is none of that name.
    """
    known = optimizers()
    if name not in known:
        raise ValueError(f"optimizer must be one of {', '.join(sorted(known))}, got {name!r}")
    return known[name]
