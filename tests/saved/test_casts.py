"""One value in several dtypes."""

import itertools
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

import memkern

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_value_that_is_used_in_several_dtypes_is_exact(dtype: torch.dtype) -> None:
    """fp16 and bf16 hold no other's values: neither serves the other's users."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def loss(dtypes: Iterable[torch.dtype]) -> Tensor:
        h = (x @ weight).to(dtype) * 1.0
        return sum((h.to(each) * h.to(each) * (i + 1)).float().sum() for i, each in enumerate(dtypes))  # type: ignore[return-value]

    for dtypes in itertools.product(FLOATS, repeat=3):
        (expected,) = torch.autograd.grad(loss(dtypes), weight)
        with memkern.quantize_saved("exact"):
            total = loss(dtypes)
        (found,) = torch.autograd.grad(total, weight)
        assert torch.equal(found, expected), dtypes
