"""What HostOffload refuses, and errors in its worker."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkern import optim
from memkern.optim import HostOffload
from memkern.optim.offload.transfers import Transfers, transfers_of
from tests.support.late_transfers import LateHostOffload
from tests.support.offloaded import MODES


def test_bad_options() -> None:
    params = [nn.Parameter(torch.ones(3))]
    for options, error, message in (
        (
            {"host_dtype": torch.bfloat16},
            ValueError,
            "host_dtype must be None, torch.float32 or torch.float64, got",
        ),
        (
            {"device_state_bytes": -1},
            ValueError,
            "device_state_bytes must be None or a number of bytes.* got -1",
        ),
        ({"device_state_bytes": "1GiB"}, ValueError, "device_state_bytes must be None or .* got '1GiB'"),
        ({"step_in_backward": True, "max_grad_norm": 1.0}, ValueError, "max_grad_norm must be None, got 1.0"),
        ({"lr": -1.0}, ValueError, "lr must be 0 or more"),
    ):
        with pytest.raises(error, match=message):
            HostOffload(optim.AdamW, params, **options)
    for given in (torch.optim.LBFGS, HostOffload, "AdamW"):
        with pytest.raises(TypeError, match="optimizer_class must be"):
            HostOffload(given, params)


def test_step_in_backward_takes_one_gradient_a_step() -> None:
    p = nn.Parameter(torch.ones(400))
    optimizer = HostOffload(optim.AdamW, [p], step_in_backward=True)
    p.sum().backward()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) between backward\(\) and step\(\)"):
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"a second gradient of a parameter of shape \(400,\) before step\(\)"):
        p.sum().backward()
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 1
    optimizer.zero_grad()
    p.sum().backward()
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 2


@pytest.mark.parametrize("mode", ["offload_gradients", "step_in_backward"])
def test_a_scaler_needs_gradients_on_the_device(mode: str) -> None:
    p = nn.Parameter(torch.ones(5))
    optimizer, scaler = HostOffload(optim.AdamW, [p], **MODES[mode]), torch.amp.GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    with pytest.raises(RuntimeError, match=r"a GradScaler cannot be used with this HostOffload.*offload_gradients"):
        scaler.step(optimizer)


def test_a_bad_gradient_is_refused_before_anything_is_changed() -> None:
    a, b = nn.Parameter(torch.ones(400)), nn.Parameter(torch.ones(400, 2))
    optimizer = LateHostOffload(optim.AdamW, [a, b])
    a.grad = torch.ones(400)
    b.grad = torch.sparse_coo_tensor([[0]], torch.ones(1, 2), (400, 2), check_invariants=True)
    with pytest.raises(RuntimeError, match=r"dense gradients, got torch\.sparse_coo"):
        optimizer.step()
    assert torch.equal(a, torch.ones(400))


def test_an_error_in_the_worker_reaches_backward() -> None:
    class Broken(optim.AdamW):
        def _init_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
            raise RuntimeError("no state today")

    p = nn.Parameter(torch.ones(400))
    optimizer = HostOffload(Broken, [p], step_in_backward=True)
    with pytest.raises(RuntimeError, match="no state today"):
        p.sum().backward()
    assert not optimizer._stepped
    optimizer.step()


@pytest.mark.parametrize("wrapper", [HostOffload, LateHostOffload])
@pytest.mark.parametrize(
    ("forward_twice", "error"),
    [(False, "a second gradient of a parameter"), (True, "modified by an inplace")],
)
def test_a_second_backward_raises_the_same_however_fast_the_thread_is(
    wrapper: type[HostOffload], forward_twice: bool, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights do not change after backward(): a forward pass before step() reads stepped ones."""

    class Slow(optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            time.sleep(0.02)
            return super().step(closure)

    monkeypatch.setattr("memkern.optim.offload.host_weights.BUCKET_ELEMENTS", 1)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = wrapper(Slow, model.parameters(), step_in_backward=True)
    losses = [model(torch.ones(4, 8)).sum() for _ in range(2 if forward_twice else 1)]
    losses[0].backward()
    stepped = [p.detach().clone() for p in model.parameters()]
    loss = losses[-1] if forward_twice else model(torch.ones(4, 8)).sum()
    with pytest.raises(RuntimeError, match=error):
        loss.backward()
    optimizer.step()
    assert all(map(torch.equal, stepped, model.parameters()))


def test_transfers_of_the_cpu_are_plain_copies() -> None:
    made = transfers_of(torch.device("cpu"))
    assert type(made) is Transfers
    assert made.shares_memory


def test_fp32_weights_of_a_model_whose_optimizer_is_on_the_host() -> None:
    for dtype, new in (
        (torch.bfloat16, optim.AdamW8bit),
        (torch.bfloat16, torch.optim.AdamW),
        (torch.float16, optim.AdamW),
    ):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 128).to(dtype)
        expected = torch.nn.Linear(64, 128)
        expected.load_state_dict(model.state_dict())
        host, plain = optim.HostOffload(new, model.parameters(), lr=1e-4), new(expected.parameters(), lr=1e-4)
        for _ in range(5):
            for p, q in zip(model.parameters(), expected.parameters(), strict=True):
                p.grad = torch.randn(p.shape).to(dtype)
                q.grad = p.grad.float()
            host.step()
            plain.step()
        found = optim.to_fp32_state_dict(model, host)
        for name, x in expected.state_dict().items():
            torch.testing.assert_close(found[name], x, rtol=1e-6, atol=1e-7)
        if new is optim.AdamW8bit:
            with pytest.raises(ValueError, match="is model a copy, or optimizer the inner one of a HostOffload"):
                optim.to_fp32_state_dict(copy.deepcopy(model), host)
            with pytest.raises(TypeError, match="HostOffload"):
                optim.load_fp32_state_dict(model, host, found)
