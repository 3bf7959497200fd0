"""memkern.compile's memory_budget: a compiled graph saves no more bytes than it says, and its peak does not rise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkern.compiled.torch_internals import functorch_config
from tests.support.helpers import first_quick
from tests.support.partitioned import backend, peak, relative_error, step

from .blocks import Block

WIDTH, TOKENS = 64, 128


def _model(blocks: int = 2) -> tuple[nn.Module, Tensor]:
    """Transformer blocks with dropout, and their input."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH, head=16, dropout=0.3) for _ in range(blocks))), torch.randn(2, TOKENS, WIDTH)


def _cut(bits: Any, budget: Any) -> tuple[int, Tensor]:
    """Saved bytes and gradients of the model compiled with a budget."""
    torch._dynamo.reset()
    model, x = _model()
    compiled = torch.compile(model, backend=backend(bits, memory_budget=budget))
    torch.manual_seed(1)
    return step(model, x, compiled)


@pytest.fixture(scope="module")
def as_torch() -> tuple[int, Tensor]:
    """Saved bytes and gradients of torch's own cut."""
    return _cut(None, None)


@pytest.mark.parametrize("bits", first_quick([8, "exact"]))
def test_a_budget_is_kept(as_torch: tuple[int, Tensor], bits: Any) -> None:
    """The model has dropout, whose masks are kept: torch's own budget draws them anew in the backward pass."""
    torchs_bytes, expected = as_torch
    last = torchs_bytes
    for budget in (0.6, torchs_bytes // 5):
        saved, gradients = _cut(bits, budget)
        assert saved <= (budget * torchs_bytes if isinstance(budget, float) else budget)
        assert saved <= last
        last = saved
        if bits == "exact":
            assert torch.equal(gradients, expected)
        else:
            assert relative_error(gradients, expected) < 0.03
    assert last > 0.1 * torchs_bytes  # not far below the last budget, a fifth


def test_a_budget_of_1_saves_what_torch_saves(as_torch: tuple[int, Tensor]) -> None:
    saved, gradients = _cut(8, 1.0)
    assert saved == as_torch[0]
    assert torch.equal(gradients, as_torch[1])


def test_a_budget_out_of_reach_warns_with_the_saved_bytes() -> None:
    torch._dynamo.reset()
    x, w = torch.randn(2048, 256), torch.randn(256, 256, requires_grad=True)
    compiled = torch.compile(lambda x, w: torch.cumsum(x @ w, 0).square() @ w, backend=backend("exact", None, 1000))
    with pytest.warns(UserWarning, match=r"saves 2,097,152 bytes, and not the 1,000 of memory_budget=1000"):
        compiled(x, w).sum().backward()


def test_torchs_budget_is_refused() -> None:
    torch._dynamo.reset()
    model, x = _model(1)
    compiled = torch.compile(model, backend=backend("exact"))
    with (
        functorch_config.patch(activation_memory_budget=0.5),
        pytest.raises(Exception, match=r"memory_budget= in place of torch's activation_memory_budget, got 0\.5"),
    ):
        compiled(x)


@pytest.mark.full
@pytest.mark.parametrize("bits", ["exact", 8])
def test_the_peak_never_rises_as_the_budget_falls(bits: Any) -> None:
    peaks = []
    for budget in (1.0, 0.6, 0.2):
        torch._dynamo.reset()
        model, x = _model(3)
        compiled = torch.compile(model, backend=backend(bits, memory_budget=budget))

        def run(compiled: Any = compiled, model: nn.Module = model, x: Tensor = x) -> None:
            model.zero_grad()
            compiled(x).square().mean().backward()

        run()
        peaks.append(peak(run))
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.6 * peaks[0]
