"""Compiled models that write a buffer, a parameter or an argument and compute with it have eager torch's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memkern
from tests.support.partitioned import backend, gradients_of, relative_error

ROWS, WIDTH = 64, 64
Wrap = Callable[[nn.Module], Callable[..., Tensor]]  # returns the model to call: compiled, or as it is


class Model(nn.Module):
    """Two linear layers with ``update`` between them, which writes a buffer or a parameter and computes with it."""

    def __init__(self, update: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.update, self.up, self.down = update, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.full((WIDTH,), 2.0))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("slots", torch.randn(8, WIDTH))
        self.register_buffer("cache", torch.zeros(2 * ROWS, WIDTH))
        self.factor = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.update(self, self.up(x)))


# ---- updates: each writes something of the model and computes with it


def factor_of_mean(self: Any, h: Tensor) -> Tensor:
    self.mean.lerp_(h.detach().mean(0), 0.5)
    return F.silu(h * self.mean)


def integer_counter(self: Any, h: Tensor) -> Tensor:
    self.count += 1
    return F.silu(h) * (1 + self.count.float()).rsqrt()


def annealed(self: Any, h: Tensor) -> Tensor:
    self.steps.add_(1)
    gate = torch.sigmoid(h * (1 + self.steps) ** 0.5)
    return gate * F.gelu(h)


def before_and_after(self: Any, h: Tensor) -> Tensor:
    old = self.mean.clone()
    self.mean.copy_(h.detach().mean(0))
    return F.silu(h * old) - F.silu(h * self.mean.clone())


def slot_by_index(self: Any, h: Tensor) -> Tensor:
    self.slots[torch.tensor([1, 3])] = h.detach()[:2]
    return F.silu(h) + self.slots.sum(0)


def cache(self: Any, h: Tensor) -> Tensor:
    """Keys of earlier calls beside those of this one."""
    self.cache[ROWS:] = self.cache[:ROWS].clone() + 1
    self.cache[:ROWS] = h.detach()
    return torch.softmax(h @ self.cache.t(), -1) @ F.silu(self.cache)


def view_of_a_buffer(self: Any, h: Tensor) -> Tensor:
    row = self.slots[0]
    row.add_(1)
    return F.silu(h) - self.slots.view(-1, 4)[:16].reshape(-1)


def parameter(self: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        self.factor.clamp_(max=0.25)
    return F.silu(h * self.factor)


def by_data(self: Any, h: Tensor) -> Tensor:
    self.mean.data.mul_(0.5)
    return F.silu(h) * torch.exp(-self.mean)


class _Doubled(torch.autograd.Function):
    """A function whose forward pass computes something for its backward pass alone."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor.exp())
        return h * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.saved_tensors[0], None


def for_the_backward_pass_alone(self: Any, h: Tensor) -> Tensor:
    y = _Doubled.apply(h, self.mean * 0.5)
    self.mean.mul_(0.5)
    return F.silu(y)


def in_a_checkpoint(self: Any, h: Tensor) -> Tensor:
    """A checkpoint's second run computes with the mean of its first."""
    self.mean.mul_(0.5)
    mean = self.mean.clone()
    return checkpoint(lambda h: F.silu(F.silu(h) - mean) * mean, h, use_reentrant=False)


UPDATES = (
    factor_of_mean, integer_counter, annealed, before_and_after, slot_by_index, cache, view_of_a_buffer, parameter,
    by_data, for_the_backward_pass_alone, in_a_checkpoint,
)  # fmt: skip


def run(update: Callable[..., Tensor], wrap: Wrap) -> tuple[Tensor, Tensor]:
    """The gradients, and all buffers with the written parameter."""
    torch._dynamo.reset()
    model = Model(update)
    wrap(model)(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))).square().mean().backward()
    return gradients_of(model), torch.cat([x.flatten() for x in (*model.buffers(), model.factor)])


def assert_alike(update: Callable[..., Tensor], wrap: Wrap, tolerance: float) -> None:
    expected, buffers = run(update, lambda model: model)
    actual, updated = run(update, wrap)
    torch.testing.assert_close(updated, buffers)
    assert relative_error(actual, expected) < tolerance


# options of tests.support.partitioned.backend
CUTS: dict[str, dict[str, Any]] = {
    "exact": {"bits": "exact"},
    "written afterwards": {"bits": "exact", "in_graph": False},
    "8 bits": {"bits": 8},
    "few bits": {"bits": "exact", "activations": 4},
    "torch's cut": {"bits": "exact", "memory_budget": 1.0},
    "products again": {"bits": "exact", "memory_budget": 0.05},
}
FULL = ("8 bits", "products again")


def _tier(update: Callable[..., Tensor], cut: str) -> Any:
    if update is annealed or cut in ("exact", "written afterwards"):
        return ()
    return pytest.mark.full if cut in FULL else pytest.mark.long


EVERY = [pytest.param(update, cut, marks=_tier(update, cut)) for cut in CUTS for update in UPDATES]


@pytest.mark.parametrize(("update", "cut"), EVERY, ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.filterwarnings("ignore:a compiled graph saves")
def test_gradients_and_buffers_are_eager_torchs(update: Callable[..., Tensor], cut: str) -> None:
    rounded = CUTS[cut]["bits"] == 8 or "activations" in CUTS[cut]
    assert_alike(update, lambda model: torch.compile(model, backend=backend(**CUTS[cut])), 0.03 if rounded else 1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("update", "bits"),
    [(slot_by_index, "exact"), (cache, 8)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_gradients_and_buffers_are_eager_torchs_through_inductor(update: Callable[..., Tensor], bits: Any) -> None:
    assert_alike(update, lambda model: memkern.compile(model, saved_bits=bits), 0.03 if bits == 8 else 1e-5)


@pytest.mark.full
def test_gradients_of_blocks_without_other_techniques_are_eager_torchs() -> None:
    """compile=True alone: with torch's own cut the backward pass would read the buffer after it was written."""

    def blocks(model: nn.Module) -> nn.Module:
        two_blocks = nn.Sequential(model, Model(annealed))
        memkern.apply(two_blocks, memkern.Techniques(compile=True))
        return two_blocks[0]

    assert_alike(annealed, blocks, 1e-5)


def _argument(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    x.mul_(0.5)
    return F.silu(x @ w)


def _column(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    x[:, 0].add_(1)
    return F.silu(w[: len(x)] * x)


def _overlapping(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """x begins in y."""
    y.add_(1)
    return F.silu(w[: len(x)] * x) * y.mean()


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize("function", [_argument, _column, _overlapping])
def test_gradients_where_arguments_are_written(function: Callable[..., Tensor], bits: Any, in_graph: bool) -> None:
    torch._dynamo.reset()
    results = []
    for f in (function, torch.compile(function, backend=backend(bits, in_graph=in_graph))):
        torch.manual_seed(0)
        w, base = torch.randn(WIDTH, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)
        (f(w, base[8:], base[:16]) @ w).square().mean().backward()
        results.append((w.grad, base))
    torch.testing.assert_close(results[1][1], results[0][1])
    assert relative_error(results[1][0], results[0][0]) < (0.03 if bits == 8 else 1e-5)  # type: ignore[arg-type]


def test_a_copy_is_made_only_of_what_is_saved() -> None:
    """The running statistics of a batch norm are written and not saved: no copy is made of them."""
    saved = []

    def look(fw: fx.GraphModule, bw: fx.GraphModule, returned: int) -> None:
        assert not any(n.target is torch.ops.aten.clone.default for n in fw.graph.nodes)
        saved.append(sum(n.meta["val"].nbytes for n in fw.graph.output_node().args[0][returned:]))  # type: ignore[index]

    for momentum in (0.1, 0.0):
        torch._dynamo.reset()
        norm = nn.BatchNorm1d(WIDTH, momentum=momentum, track_running_stats=momentum > 0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        torch.compile(model, backend=backend("exact", look))(torch.randn(ROWS, WIDTH)).sum().backward()
    assert saved[0] == saved[1]
