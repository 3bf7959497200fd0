"""torch.compile of forward pass, backward pass and step: bits of eager mode, with schedules and changing shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memkern
from memkern import optim
from tests.support.helpers import assert_same, first_full, snapshot

# Options of memkern.compress.
COMPRESS: dict[str, dict[str, Any]] = {
    "3 bits": {},
    "output": {"activations": "output"},
    "rows": {"linear": {"share": 0.5, "min_tokens": 0}},
    "dct": {"linear": {"share": 0.5, "min_tokens": 0, "projection": "dct"}},
}
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def model(case: str = "3 bits") -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 128),
        torch.nn.GELU(),
        torch.nn.Linear(128, 64),
        torch.nn.SiLU(),
        torch.nn.Linear(64, 64),
    )
    memkern.compress(net, **COMPRESS[case])
    return net


def batch(seed: int, rows: int = 32) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.feature("torch", "`torch.compile`: forward, backward and step, 20 steps of a schedule without a recompile")
@pytest.mark.parametrize(
    ("build", "lr"), [(optim.AdamW8bit, "tensor"), pytest.param(optim.LAMB8bit, "float", marks=pytest.mark.full)]
)
def test_20_steps_of_a_schedule_compile_once(build: type, lr: str) -> None:
    def train(compiles: bool) -> Any:
        net = model()
        optimizer = build(net.parameters(), lr=torch.tensor(1e-2) if lr == "tensor" else 1e-2)
        compiled = (lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")) if compiles else (lambda f: f)
        forward, step = compiled(net), compiled(optimizer.step)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        losses = []
        for i in range(20):
            # A float lr first changes in the second step, where torch.compile makes it a variable; a tensor is one from
            # the beginning.
            with torch._dynamo.config.patch(error_on_recompile=i > (lr == "float")):
                loss = torch.nn.functional.mse_loss(forward(batch(i)), batch(i))
                loss.backward()
                step()
            optimizer.zero_grad()
            optimizer._opt_called = True  # else the scheduler warns that nobody has stepped
            scheduler.step()
            losses.append(loss.detach())
        return losses, snapshot(optimizer)

    assert_same(train(True), train(False))


@pytest.mark.feature("torch", "`torch.compile(dynamic=True)`, every way to compress")
@pytest.mark.parametrize(
    "case",
    [
        case if case == "3 bits" else pytest.param(case, marks=pytest.mark.full if case == "rows" else pytest.mark.long)
        for case in COMPRESS
    ],
)
def test_a_dynamic_graph_serves_shapes_that_change(case: str) -> None:
    net = model(case)
    compiled = torch.compile(net, dynamic=True, fullgraph=True, backend="aot_eager")
    for i, rows in enumerate((32, 48, 33, 7, 64)):
        x = batch(i, rows)
        with torch._dynamo.config.patch(error_on_recompile=i > 1):
            y = compiled(x)
            y.square().mean().backward()
        assert_same(y.detach(), net(x).detach())
        assert all(p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.full
@pytest.mark.parametrize("case", first_full(["rows", "dct"]))
def test_projections_of_changing_shapes_are_unbiased(case: str) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 8)
    exact = torch.nn.Linear(16, 8)
    exact.load_state_dict(layer.state_dict())
    memkern.compress(layer, linear=COMPRESS[case]["linear"])
    compiled = torch.compile(layer, dynamic=True, fullgraph=True, backend="aot_eager")
    for rows in (24, 40):
        x, r = torch.randn(rows, 16), torch.randn(rows, 8)
        (exact(x) * r).sum().backward()
        for _ in range(300):
            (compiled(x) * r).sum().backward()
        error = (layer.weight.grad / 300 - exact.weight.grad).norm() / exact.weight.grad.norm()
        assert error < 0.2  # one estimate is off by about the gradient's norm, 300 by 1 / sqrt(300) of it: 0.06
        layer.zero_grad(), exact.zero_grad()
