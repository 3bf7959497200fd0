"""Frozen parameters may have any dtype or layout, such as 4-bit weights under adapters; unfrozen ones are checked."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkern import optim
from memkern.optim import HostOffload, StepInBackward
from tests.support.helpers import assert_same, over_kinds, snapshot
from tests.support.offloaded import MODES

# Tensors that no step could take if they were trainable, and two that one could.
FROZEN: dict[str, Callable[[], Tensor]] = {
    "uint8": lambda: torch.ones(8, 1, dtype=torch.uint8),
    "int8": lambda: torch.ones(8, 16, dtype=torch.int8),
    "float8": lambda: torch.ones(8, 16, dtype=torch.float8_e4m3fn),
    "complex": lambda: torch.ones(8, 16, dtype=torch.complex64),
    "float64": lambda: torch.ones(8, 16, dtype=torch.float64),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "expanded": lambda: torch.ones(8, 1).expand(8, 16),
    "vector": lambda: torch.ones(8),
    "meta": lambda: torch.ones(8, 16, device="meta"),
}


def frozen_of(kind: str) -> nn.Parameter:
    return nn.Parameter(FROZEN[kind](), requires_grad=False)


def train(make: Callable[[list[Any]], Any], params: list[Any], steps: int = 3) -> Any:
    """The optimizer and the parameters that require a gradient, after some backward passes and steps."""
    optimizer = make(params)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        trainable = [p for p in params if p.requires_grad]
        sum((p * torch.randn(p.shape, generator=generator)).sum() for p in trainable).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, [p for p in params if p.requires_grad]


def adapter() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 64 * 128).view(64, 128))


@over_kinds
@pytest.mark.parametrize("kind", FROZEN)
def test_a_frozen_parameter_of_any_kind_changes_nothing(build: type, kind: str) -> None:
    make = lambda params: build(params, lr=1e-2)  # noqa: E731
    optimizer, params = train(make, [frozen_of(kind), adapter()])
    plain, expected = train(make, [adapter()])
    assert_same(params, expected)
    resumed = make([frozen_of(kind), params[0]])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same([*resumed.state.values()], [*plain.state.values()])


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", FROZEN)
@pytest.mark.parametrize("mode", [*MODES, "StepInBackward"])
@pytest.mark.parametrize("build", [optim.AdamW8bit, optim.Muon8bit, torch.optim.AdamW])
def test_a_frozen_parameter_in_wrappers_changes_nothing(build: type, mode: str, kind: str) -> None:
    make: Callable[[Any], Any] = (
        (lambda params: StepInBackward(build, params, lr=1e-2))
        if mode == "StepInBackward"
        else (lambda params: HostOffload(build, params, lr=1e-2, **MODES[mode]))
    )
    optimizer, params = train(make, [frozen_of(kind), adapter()])
    assert_same(params, train(lambda params: build(params, lr=1e-2), [adapter()])[1])
    before = copy.deepcopy(snapshot(optimizer)["states"])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same(snapshot(optimizer)["states"], before)


def test_master_weights_beside_frozen_4_bit_weights() -> None:
    """QLoRA: master_weights in a group with bf16 adapters and 4-bit weights, which need no rounding errors kept."""
    params = [frozen_of("uint8"), nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))]
    optimizer = optim.AdamW8bit(params, master_weights="bf16+8")
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    host = HostOffload(optim.AdamW8bit, params)
    assert host.param_groups[0]["master_weights"] == "bf16+16"


@over_kinds
def test_an_unfrozen_parameter_that_no_step_can_take_is_named(build: type) -> None:
    p, bad = adapter(), nn.Parameter(torch.ones(8, 1).expand(8, 16), requires_grad=False)
    optimizer = build([("adapter", p), ("base.weight", bad)])
    p.grad = torch.ones_like(p)
    optimizer.step()
    before = snapshot(optimizer)
    bad.requires_grad_()
    bad.grad = torch.ones(8, 16)
    with pytest.raises(ValueError, match=r"parameter 1 \('base.weight'\): params must have each element"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)


# name: what makes the optimizer, the dtype of the parameter that is unfrozen later; fp64 has an op call of its own
UNFROZEN: dict[str, tuple[Any, torch.dtype]] = {
    **{build.__name__: (build, torch.float32) for build in (optim.AdamW8bit, optim.LAMB8bit, optim.SGD)},
    "fp64": (lambda params: optim.AdamW8bit(params, state_bits=32), torch.float64),
    **{
        f"{build.__module__}, {mode}, {dtype}": (functools.partial(HostOffload, build, lr=1e-2, **MODES[mode]), dtype)
        for build in (optim.AdamW8bit, torch.optim.AdamW)
        for mode in MODES
        for dtype in (torch.float32, torch.bfloat16)
    },
}


@pytest.mark.parametrize("name", UNFROZEN)
def test_an_unfrozen_parameter_trains(name: str) -> None:
    make, dtype = UNFROZEN[name]

    def run(requires_grad: bool) -> list[Tensor]:
        params = [adapter(), nn.Parameter(torch.ones(64, 128, dtype=dtype), requires_grad=requires_grad)]
        optimizer = make(params)
        generator = torch.Generator().manual_seed(1)
        for step in range(4):
            params[1].requires_grad_(requires_grad or step > 0)
            with_gradients = params if step else params[:1]
            sum((p * torch.randn(p.shape, generator=generator)).sum() for p in with_gradients).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        return params

    assert_same(run(False), run(True))


def test_frozen_parameters_may_be_on_another_device() -> None:
    """StepInBackward needs one device for the trainable parameters alone."""
    base = nn.Parameter(torch.ones(8, 16, device="meta"), requires_grad=False)
    p = adapter()
    optimizer = StepInBackward(optim.AdamW8bit, [base, p])
    p.sum().backward()
    optimizer.step()
    base.requires_grad_()
    p.sum().backward()
    with pytest.raises(ValueError, match="must be on one device"):
        optimizer.step()


def test_param_groups_leave_frozen_parameters_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model[0].requires_grad_(False)
    for groups in (optim.param_groups(model), optim.param_groups(model, weight_decay=0.1)):
        assert [p for group in groups for p in group["params"]] == [*model[1].parameters()]
