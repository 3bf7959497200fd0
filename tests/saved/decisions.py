"""What the hooks decide for each saved tensor, by Python and by C++, side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from memkern.saved import extension
from memkern.saved.session import Session

Decision = tuple[Any, ...]


def describe(packed: Any) -> Decision:
    value = packed.value
    codec = getattr(value, "codec", None)
    data = getattr(value, "data", ())
    data = [x for x in data if isinstance(x, Tensor)] if isinstance(data, (tuple, list)) else [type(data)]
    return (
        *(type(value).__name__.lstrip("_"), value.dtype, value.precision, value.lossy, value.rounded, value.coarse),
        *(value.clipped, value.functions, value.steps, len(value.bases), value.block_size, codec and codec.name),
        [(x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else x for x in data],
    )


@contextlib.contextmanager
def noted(python: bool) -> Iterator[list[Any]]:
    """What all sessions pack inside, by Python's hooks or by those of C++."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        if python:
            patch.setattr(extension, "missing", lambda: "for comparison")
            kind = Session
        else:
            from memkern.saved.native import NativeSession as kind  # type: ignore[assignment]
        pack = kind.pack

        def __torch_function__(self: Any, x: Tensor) -> Any:  # named so, the caller is looked for behind it
            packed = pack(self, x)
            found.append(packed)
            return packed

        patch.setattr(kind, "pack", __torch_function__)
        yield found


Outcome = tuple[list[Decision], list[Tensor | None]]


def decided(run: Callable[[], tuple[Tensor, list[Tensor]]], python: bool) -> Outcome:
    """The decisions and gradients of a forward and backward pass; run gives the loss and what needs gradients."""
    torch.manual_seed(0)
    with noted(python) as found:
        loss, wanted = run()
        rows = [describe(packed) for packed in found]
        found.clear()
        return rows, list(torch.autograd.grad(loss, wanted, allow_unused=True))


def check_equal(run: Callable[[], tuple[Tensor, list[Tensor]]]) -> int:
    """The number of decisions, which are the same in both; the gradients have the same bits."""
    (rows, expected), (own_rows, own) = (decided(run, python) for python in (True, False))
    assert own_rows == rows
    for a, b in zip(expected, own, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a.nan_to_num(), b.nan_to_num())
    return len(rows)
