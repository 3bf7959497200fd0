"""memory_budget: the bytes that a compiled graph saves, its peak, and what stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memkern
from memkern.compiled.partitioner import Partitioner
from memkern.compiled.torch_internals import functorch_config
from tests.support.helpers import first_quick
from tests.support.partitioned import backend, peak

WIDTH, HEAD, TOKENS = 64, 16, 128


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), 0.3)


def _model(blocks: int = 2) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(_Block() for _ in range(blocks))), torch.randn(2, TOKENS, WIDTH)


def _step(compiled: Any, model: nn.Module, x: Tensor) -> tuple[int, Tensor]:
    """The bytes that are saved of what is computed, and the gradients."""
    given = {y.untyped_storage()._cdata for y in (x, *model.parameters())}
    saved: dict[int, int] = {}

    def pack(y: Tensor) -> Tensor:
        if y.untyped_storage()._cdata not in given:
            saved[y.untyped_storage()._cdata] = y.untyped_storage().nbytes()
        return y

    torch.manual_seed(1)
    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        loss = compiled(x).square().mean()
    loss.backward()
    return sum(saved.values()), torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]


def _cut(bits: Any, budget: Any, blocks: int = 2) -> tuple[int, Tensor]:
    torch._dynamo.reset()
    model, x = _model(blocks)
    compiled = torch.compile(model, backend=backend(bits, memory_budget=budget))
    saved, gradients = _step(compiled, model, x)
    return saved - x.nbytes, gradients  # without the output, which loss's square saves


@pytest.fixture(scope="module")
def as_torch() -> tuple[int, Tensor]:
    return _cut(None, None)


@pytest.mark.parametrize("bits", first_quick([8, "exact"]))
def test_a_budget_is_kept(as_torch: tuple[int, Tensor], bits: Any) -> None:
    """With dropout's masks: torch's own budget draws them anew in the backward pass."""
    whole, expected = as_torch
    before = whole
    for budget in (0.6, whole // 5):
        saved, gradients = _cut(bits, budget)
        assert saved <= (budget * whole if isinstance(budget, float) else budget)
        assert saved <= before
        before = saved
        if bits == "exact":
            assert torch.equal(gradients, expected)
        else:
            assert (gradients - expected).norm() < 0.03 * expected.norm()
    assert before > 0.1 * whole  # no more than is asked for


def test_a_whole_budget_is_torchs_choice(as_torch: tuple[int, Tensor]) -> None:
    saved, gradients = _cut(8, 1.0)
    assert saved == as_torch[0]
    assert torch.equal(gradients, as_torch[1])


def test_a_budget_out_of_reach_is_a_warning() -> None:
    torch._dynamo.reset()
    x, w = torch.randn(2048, 256), torch.randn(256, 256, requires_grad=True)
    compiled = torch.compile(lambda x, w: torch.cumsum(x @ w, 0).square() @ w, backend=backend("exact", None, 1000))
    with pytest.warns(UserWarning, match=r"saves 2,097,152 bytes, and not the 1,000 of memory_budget=1000"):
        compiled(x, w).sum().backward()


@pytest.mark.parametrize("budget", [0.0, -0.5, 1.5, 0, 1, -3, True, "0.5", float("nan"), (0.5,)])
def test_no_budget(budget: Any) -> None:
    with pytest.raises(ValueError, match="memory_budget must be a share"):
        memkern.compile(nn.Linear(2, 2), memory_budget=budget)


def test_torchs_budget_is_refused() -> None:
    torch._dynamo.reset()
    model, x = _model(1)
    compiled = torch.compile(model, backend=backend("exact"))
    with (
        functorch_config.patch(activation_memory_budget=0.5),
        pytest.raises(Exception, match=r"memory_budget= in place of torch's activation_memory_budget, got 0\.5"),
    ):
        compiled(x)


def test_the_caches_key_has_the_budget() -> None:
    assert len({str(Partitioner(8, b).uuid()) for b in (None, 0.5, 0.4, 2**20)}) == 4


@pytest.mark.full
@pytest.mark.parametrize("bits", ["exact", 8])
def test_the_peak_never_rises_as_the_budget_falls(bits: Any) -> None:
    peaks = []
    for budget in (1.0, 0.6, 0.2):
        torch._dynamo.reset()
        model, x = _model(3)
        compiled = torch.compile(model, backend=backend(bits, memory_budget=budget))

        def step(compiled: Any = compiled, model: nn.Module = model, x: Tensor = x) -> None:
            model.zero_grad()
            compiled(x).square().mean().backward()

        step()
        peaks.append(peak(step))
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.6 * peaks[0]
