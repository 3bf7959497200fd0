"""torch's own database of operations, with every saved tensor coded that may be.

14,000 programs: "exact" has torch's bits, and 8 bits leave gradients within 3 %.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import memkern
from memkern.saved import store

pytest.importorskip("expecttest")  # which torch's database imports
from torch.testing._internal.common_methods_invocations import op_db

OPS = [op for op in op_db if op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")]
BOUND = {
    # A random projection of few rows: torch's own gradient moves as much when its input moves by a code.
    "pca_lowrank": (0.1, 0.0),
    # Of two observations the gradient is 0, a difference of terms of order 10, each within 3 %.
    "cov": (0.03, 1.0),
    "corrcoef": (0.03, 0.2),
}
"""Relative and absolute errors that are more than 3 % and 1e-6, where a gradient is 0 but for rounding."""


SAMPLES = 2  # of an operation in the full tier; all of them take four minutes


def weighted(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 1, max(1, out.numel()))[: out.numel()].view(out.shape)).sum()


def multiplied(out: Tensor) -> Tensor:
    """A product is the result's next user, so that what smooth operations save may be coded."""
    rows = out.reshape(-1, out.shape[-1] if out.dim() else 1)
    return weighted(rows @ torch.linspace(-1, 1, rows.shape[1] * 3).view(rows.shape[1], 3))


def gradients(op: Any, sample: Any, use: Callable[[Tensor], Tensor], bits: Any) -> list[Tensor | None]:
    """Those of a sample's tensors, which reach the operation as results of another one."""
    torch.manual_seed(0)
    leaves: list[Tensor] = []

    def given(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if not x.requires_grad:
            return x.detach().clone()
        leaves.append(x.detach().clone().requires_grad_())
        return leaves[-1] * 1.0

    def loss() -> Any:
        x, args, kwargs = tree_map(given, (sample.input, sample.args, sample.kwargs))
        outs = [x for x in tree_leaves(op.op(x, *args, **kwargs)) if isinstance(x, Tensor)]
        real = [x.abs() if x.is_complex() else x for x in outs if x.requires_grad and x.layout is torch.strided]
        return sum(map(use, real))

    if bits is None:
        total = loss()
    else:
        with memkern.quantize_saved(bits):
            total = loss()
    if not isinstance(total, Tensor):  # sparse results, or none that needs a gradient
        return []
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [None if g is None or g.layout is not torch.strided else g.nan_to_num() for g in found]


@pytest.mark.parametrize(
    "most",
    [pytest.param(SAMPLES, marks=pytest.mark.full), pytest.param(None, marks=pytest.mark.long)],
    ids=["some", "all"],
)
@pytest.mark.parametrize("use", [weighted, multiplied], ids=lambda use: use.__name__)
@pytest.mark.parametrize("op", OPS, ids=lambda op: f"{op.name}-{op.variant_test_name}".rstrip("-"))
def test_an_operation(
    op: Any, use: Callable[[Tensor], Tensor], most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MIN_NUMEL", 2)
    warnings.simplefilter("ignore")
    relative, absolute = BOUND.get(op.name, (0.03, 1e-6))
    samples = [*enumerate(op.sample_inputs("cpu", torch.float32, requires_grad=True))]
    for i, sample in samples if most is None else samples[:: max(1, len(samples) // most)]:
        try:
            expected = gradients(op, sample, use, None)
        except (RuntimeError, NotImplementedError):  # torch's own backward pass refuses some
            continue
        exact, coded = (gradients(op, sample, use, bits) for bits in ("exact", 8))
        for e, a, b in zip(expected, exact, coded, strict=True):
            if e is not None and a is not None and b is not None:
                assert torch.equal(a, e), i
                assert (b - e).norm() <= relative * e.norm() + absolute, i
