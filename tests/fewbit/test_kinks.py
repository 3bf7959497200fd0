"""Derivatives where they jump."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memkern
from memkern.fewbit.tables import LEVELS


@pytest.mark.parametrize("beta", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("threshold", [20.0, 5.0, 2.0, 1.0, 0.0, -1.0])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_softplus_above_its_threshold_is_x(bits: int, threshold: float, beta: float) -> None:
    x = torch.linspace(-8, 8, 1001, requires_grad=True)

    def error(threshold: float) -> Tensor:
        (found,) = torch.autograd.grad(memkern.functional.softplus(x, beta, threshold, bits=bits).sum(), x)
        (expected,) = torch.autograd.grad(F.softplus(x, beta, threshold).sum(), x)
        return (found - expected).abs()

    of_the_table = max(float(error(1e9).max()), 1 - max(LEVELS["softplus", bits].levels))
    assert error(threshold).max() < of_the_table + 1e-6
    if threshold <= 1 and bits > 2:
        assert (error(threshold)[beta * x.detach() > threshold] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["hardswish", "relu", "leaky_relu", "hardtanh"])
def test_derivatives_at_kinks_are_torchs(name: str, dtype: torch.dtype) -> None:
    """bf16 and fp16 meet them."""
    x = torch.tensor([-3.0, -1.0, -0.0, 0.0, 1.0, 3.0], dtype=dtype, requires_grad=True)
    options = {"bits": 4} if name == "hardswish" else {}
    (found,) = torch.autograd.grad(getattr(memkern.functional, name)(x, **options).sum(), x)
    (expected,) = torch.autograd.grad(getattr(F, name)(x).sum(), x)
    assert (found - expected).abs().max() < (0.05 if options else 1e-6)
