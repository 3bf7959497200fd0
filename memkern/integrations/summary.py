"""The table of what training saves with memkern: optimizer states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..memory import optimizer_bytes
from ..swap.report import Report

_FP32 = 4  # bytes of an fp32 moment per element


def blockwise(optimizer: Any) -> Any:
    """memkern's optimizer inside a framework's wrapper (accelerate, Lightning); None for another optimizer."""
    while optimizer is not None and not hasattr(optimizer, "moments"):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


def state_row(optimizer: Optimizer | None) -> tuple[str, int, int] | None:
    """Bytes of the states that memkern's optimizer has, beside fp32 moments of the same parameters."""
    found = blockwise(optimizer)
    if found is None or not found.state:
        return None
    numel = sum(p.numel() for p in found.state)
    before = _FP32 * numel * len(found.moments)
    return f"optimizer states ({type(found).__name__})", before, optimizer_bytes(found)


def table(rows: Iterable[tuple[str, int, int] | None]) -> str:
    """Rows of a name, bytes with torch's, and bytes with memkern's."""
    lines = [("memkern: bytes", "torch", "memkern", "share")]
    lines += [(row[0], f"{row[1]:,}", f"{row[2]:,}", f"{row[2] / row[1]:.1%}") for row in rows if row and row[1]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


class Compressing:
    """Shared by the callbacks of all frameworks: compresses a model once, prints what that saved and the states' bytes.

    options: those of :func:`memkern.compress`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.report: Report | None = None
        self._model: nn.Module | None = None
        self._told = False

    def compress(self, model: nn.Module, tell: bool) -> None:
        """Compresses a model once; a second call with it changes nothing."""
        if self._model is model:
            return
        from ..swap.compress import compress

        self.report, self._model, self._told = compress(model, **self.options), model, False
        if tell:
            print(self.report, flush=True)

    def after_step(self, optimizer: Any, tell: bool) -> None:
        """Prints the table after the first step, when there are states."""
        if self._told or self.report is None:
            return
        self._told = True
        row = state_row(optimizer)
        if row and tell:
            print(table([row]), flush=True)
