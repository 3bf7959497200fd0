"""HostOffload's worker and its caller: what is done between backward() and step() comes after backward()'s steps."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memkern import optim
from memkern.optim import HostOffload, StepInBackward
from memkern.optim.offload import host_weights, worker
from tests.support.helpers import assert_same, snapshot

LR = 0.5


class SlowHostOffload(HostOffload):
    """The worker is still at its first bucket when the last gradient has come."""

    def _step_bucket(self, bucket: Any) -> None:
        time.sleep(0.005)
        return super()._step_bucket(bucket)


def params_of(count: int = 3) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(64, 64, generator=generator)) for _ in range(count)]


def slow(build: type, params: Any, **options: Any) -> HostOffload:
    return SlowHostOffload(build, params, step_in_backward=True, **options)


def backward(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    sum((p * torch.randn(p.shape, generator=generator)).sum() for p in params).backward()  # type: ignore[union-attr]


def states_of(optimizer: Any) -> dict[int, Any]:
    """By number: StepInBackward makes them in the backward pass's order."""
    return copy.deepcopy(dict(sorted(optimizer.state_dict()["state"].items())))


def set_options(**options: Any) -> Callable[[Any], None]:
    def change(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group.update(options)

    return change


def fill_lr(optimizer: Any) -> None:
    """As a schedule does where lr is a tensor."""
    for group in optimizer.param_groups:
        group["lr"].fill_(100 * LR)


def load_own_state(optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def add_group(optimizer: Any) -> None:
    optimizer.add_param_group({"params": params_of(1), "lr": 100 * LR})


def new_state(optimizer: Any) -> None:
    optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})


BETWEEN: dict[str, Callable[[Any], Any]] = {
    "lr": set_options(lr=100 * LR),
    "betas": set_options(betas=(0.5, 0.5)),
    "lr, in place": fill_lr,
    "block_size": set_options(block_size=64),
    "codec": set_options(codec="dynamic"),
    "state_bits": set_options(state_bits=32),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "load_state_dict": load_own_state,
    "load_state_dict of no state": new_state,
    "add_param_group": add_group,
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("between", BETWEEN)
def test_what_is_done_between_backward_and_step(between: str, steps_before: int) -> None:
    """As with StepInBackward, which has taken all steps when backward() returns."""
    found = []
    for make in (
        lambda params, **options: StepInBackward(optim.AdamW8bit, params, **options),
        lambda params, **options: slow(optim.AdamW8bit, params, **options),
    ):
        params = params_of()
        lr = torch.tensor(LR) if "in place" in between else LR
        optimizer = make(params, lr=lr, min_8bit_size=0)
        for step in range(steps_before + 3):
            backward(params, step)
            if step == steps_before:
                BETWEEN[between](optimizer)
            optimizer.step()
            optimizer.zero_grad()
        found.append(({"params": params}, snapshot(optimizer)))
    assert_same(found[1], found[0])


def test_state_dict_and_copies_have_the_steps_of_backward() -> None:
    def states(optimizer: Any) -> list[Any]:
        backward(optimizer.param_groups[0]["params"], 0)
        return [states_of(optimizer), states_of(copy.deepcopy(optimizer)), states_of(optimizer)]

    expected = states(StepInBackward(optim.Lion8bit, params_of(), min_8bit_size=0))
    found = states(slow(optim.Lion8bit, params_of(), min_8bit_size=0))
    assert_same(found, expected)
    assert found[0][0]["step"] == 1


def test_fp32_weights_between_backward_and_step() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3))).bfloat16()
    optimizer = slow(torch.optim.SGD, model.parameters(), lr=1e-3)
    before = optim.to_fp32_state_dict(model, optimizer)
    sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    after = optim.to_fp32_state_dict(model, optimizer)
    for name, x in before.items():
        torch.testing.assert_close(after[name], x - 1e-3)


def test_a_bucket_that_waits_for_a_gradient_has_the_options_of_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_weights, "BUCKET_ELEMENTS", 2**22)
    params = params_of()
    optimizer = HostOffload(torch.optim.SGD, params, lr=1.0, step_in_backward=True)
    assert len(optimizer._weights.buckets) == 1
    before = [p.detach().clone() for p in params]
    (params[0].sum() + params[1].sum()).backward()
    params[2].grad = torch.ones_like(params[2])
    set_options(lr=2.0)(optimizer)
    optimizer.step()
    moved = [(old - p).mean().round().item() for old, p in zip(before, params, strict=True)]
    assert moved == [1.0, 1.0, 2.0]  # the last one was set by hand


def test_options_are_checked_before_the_first_step_of_backward() -> None:
    params = params_of()
    optimizer = HostOffload(optim.AdamW8bit, params, step_in_backward=True, min_8bit_size=0)
    before = [p.detach().clone() for p in params]
    set_options(block_size=3)(optimizer)
    with pytest.raises(ValueError, match="block_size"):
        backward(params, 0)
    assert all(map(torch.equal, params, before))
    set_options(block_size=64)(optimizer)
    for p in params:
        p.grad = None
    backward(params, 0)
    optimizer.step()
    assert not any(map(torch.equal, params, before))


def test_an_interrupted_wait_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while step() waits for the worker: whatever comes next waits again."""
    params = params_of()
    optimizer = slow(optim.AdamW8bit, params, min_8bit_size=0)
    real = worker.wait

    def interrupted(futures: Any) -> Any:
        monkeypatch.setattr(worker, "wait", real)
        raise KeyboardInterrupt

    backward(params, 0)
    monkeypatch.setattr(worker, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    state = states_of(optimizer)
    twin = params_of()
    expected = StepInBackward(optim.AdamW8bit, twin, min_8bit_size=0)
    backward(twin, 0)
    assert_same(state, states_of(expected))
    optimizer.step()
    assert_same(params, twin)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reentrant checkpoint has backward passes of its own inside, of which each ends by itself."""
    monkeypatch.setattr("memkern.optim.offload.host_weights.BUCKET_ELEMENTS", 1)

    def trained(build: Any, **options: Any) -> Any:
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3))
        optimizer = build(params=model.parameters(), lr=1e-2, min_8bit_size=0, **options)
        for seed in range(3):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            for block in model:
                x = checkpoint(block, x, use_reentrant=reentrant)
            x.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    found = trained(HostOffload, optimizer_class=optim.AdamW8bit, step_in_backward=True)
    assert_same(found, trained(optim.AdamW8bit))
