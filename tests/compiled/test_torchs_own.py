"""torch's own float8 quantization and memory budget of compiled graphs have the faults that docs/compiled.md names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkern.compiled.torch_internals import functorch_config, inductor_config
from tests.support.partitioned import backend, gradients_of, relative_error


def _gradients(dtype: torch.dtype, dropout: float, budget: Any = None) -> Tensor:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [nn.Linear(128, 512), nn.GELU(), nn.Dropout(dropout), nn.Linear(512, 512), nn.GELU()]
    model = nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(512, 128)).to(dtype)
    cut = backend("exact" if budget else None, memory_budget=budget)
    torch.compile(model, backend=cut)(torch.randn(64, 128, dtype=dtype)).float().square().mean().backward()
    return gradients_of(model)


@pytest.mark.full
def test_float8_quantization_without_scales_is_useless() -> None:
    expected = _gradients(torch.bfloat16, 0.0)
    for options, low, high in (({}, 1e3, 1e9), ({"use_scaling": True}, 1e-3, 0.05)):  # bounds of the relative error
        settings = {"quant_type": "torch.float8_e5m2", "size_in_mb": 0, **options}
        with inductor_config.patch(post_grad_fusion_options={"activation_quantization_aten_pass": settings}):
            actual = _gradients(torch.bfloat16, 0.0)
        assert low < relative_error(actual, expected) < high


@pytest.mark.full
def test_torchs_budget_draws_dropout_anew_and_memkerns_does_not() -> None:
    expected = _gradients(torch.float32, 0.5)
    with functorch_config.patch(activation_memory_budget=0.1):
        actual = _gradients(torch.float32, 0.5)
    assert relative_error(actual, expected) > 0.5
    assert torch.equal(_gradients(torch.float32, 0.5, 0.1), expected)
