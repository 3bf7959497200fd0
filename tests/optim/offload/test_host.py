"""HostOffload has the bits of steps without it, also clipped, scaled, and resumed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkern import optim
from memkern.optim import HostOffload
from tests.support.generic_optimizers import saved_and_loaded
from tests.support.helpers import EIGHT_BIT, assert_same, name_of, snapshot
from tests.support.late_transfers import LateHostOffload
from tests.support.offloaded import (
    MODES,
    ON_DEVICE,
    TORCH_CLASSES,
    losses,
    model_of,
    options_of,
    over_modes,
    over_transfers,
    run,
)

# ---- the same result


BF16 = torch.bfloat16
ROUNDED: dict[str, Any] = {"master_weights": "bf16+8", "min_8bit_size": 0}
# name: the optimizer's class, options of that class, options of HostOffload, options of the training loop
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    **{build.__name__: (build, options_of(build), {}, {}) for build in (*EIGHT_BIT, optim.AdamW)},
    **{f"torch's {build.__name__}": (build, options_of(build), {}, {}) for build in TORCH_CLASSES},
    "fp64": (optim.AdamW, {"lr": 1e-2}, {}, {"dtype": torch.float64}),
    "bf16": (optim.AdamW8bit, {"lr": 1e-2}, {"host_dtype": None}, {"dtype": BF16}),
    "rounding errors": (optim.AdamW8bit, ROUNDED, {"host_dtype": None}, {"dtype": BF16}),
    # master_weights alone says that the host keeps bf16 weights
    "rounding errors, as master_weights says": (optim.AdamW8bit, ROUNDED, {}, {"dtype": BF16}),
    "stochastic rounding": (optim.AdamW8bit, {"stochastic_rounding": True, "min_8bit_size": 0}, {}, {"dtype": BF16}),
    "micro-batches": (optim.AdamW, {}, {}, {"micro_batches": 3}),
    # gradients are added in the parameter's dtype, on the host too
    "micro-batches, bf16": (optim.AdamW, {}, {"host_dtype": None}, {"micro_batches": 3, "dtype": BF16}),
    "clipped": (optim.AdamW8bit, {"max_grad_norm": 1e-3}, {}, {}),
    "clipped LARS": (optim.LARS, {"max_grad_norm": 1e-3}, {}, {}),
}


def fits(case: str, mode: str) -> bool:
    """Whether a mode takes the case: steps on the device need one of memkern's classes and no options of steps on the
    CPU; in the backward pass also a single backward pass before each step, and no norm of all gradients.
    """
    build, options, host_options, loop = CASES[case]
    can_step_on_device = build not in TORCH_CLASSES and not host_options
    can_step_in_backward = "max_grad_norm" not in options and "micro_batches" not in loop
    return mode in MODES or (can_step_on_device and (can_step_in_backward or "backward" not in mode))


@pytest.mark.parametrize(
    ("case", "mode", "wrapper"),
    [
        *((c, m, LateHostOffload) for c in CASES for m in (*MODES, *ON_DEVICE) if fits(c, m)),
        *((c, "default", HostOffload) for c in CASES),
    ],
    ids=name_of,
)
def test_has_the_bits_of_the_step_in_memory(case: str, mode: str, wrapper: type[HostOffload]) -> None:
    build, options, host_options, loop = CASES[case]
    expected, _, _ = run(lambda params: build(params, **options), **loop)
    make = lambda params: wrapper(build, params, **(MODES | ON_DEVICE)[mode], **host_options, **options)  # noqa: E731
    result, optimizer, _ = run(make, **loop)
    assert_same(result, expected)
    assert mode in ON_DEVICE or "max_grad_norm" in options or len(optimizer._weights.buckets) > 2


class MixedByHand:
    """The published recipe by hand: a half-precision model, and an optimizer of an fp32 copy."""

    def __init__(self, build: type, params: Any, **options: Any) -> None:
        self.params = [*params]
        self.masters = [nn.Parameter(p.detach().float()) for p in self.params]
        self.optimizer = build(self.masters, **options)

    def step(self) -> None:
        for p, master in zip(self.params, self.masters, strict=True):
            master.grad = p.grad.float()
        self.optimizer.step()
        for p, master in zip(self.params, self.masters, strict=True):
            p.data.copy_(master.data)
            p.grad = None


@pytest.mark.pairwise
@over_modes
@over_transfers
@pytest.mark.parametrize("build", [optim.AdamW, optim.AdamW8bit, optim.LAMB8bit, torch.optim.AdamW], ids=name_of)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_a_half_precision_model_has_the_bits_of_mixed_precision_by_hand(
    mode: str, wrapper: type[HostOffload], build: type, dtype: torch.dtype
) -> None:
    options = options_of(build)
    models = [model_of(dtype) for _ in range(2)]
    by_hand = MixedByHand(build, models[0].parameters(), **options)
    optimizer = wrapper(build, models[1].parameters(), **MODES[mode], **options)
    for _ in range(3):
        x = torch.randn(8, 16).to(dtype)
        for model, stepper in zip(models, (by_hand, optimizer), strict=True):
            model(x).float().square().mean().backward()
            stepper.step()
        optimizer.zero_grad()
    assert_same([*models[1].parameters()], [*models[0].parameters()])
    states = [dict(optimizer.state[p]) for p in models[1].parameters()]
    weights = [*optim.to_fp32_state_dict(models[1], optimizer).values()]
    for state in states:
        state.pop("weight_error", None)
    assert_same(weights, [w.detach() for w in by_hand.masters])
    assert_same(states, [by_hand.optimizer.state[p] for p in by_hand.masters])


@over_transfers
@pytest.mark.parametrize(
    ("build", "mode"),
    [(optim.AdamW8bit, {}), (torch.optim.AdamW, {}), (optim.LAMB8bit, {"step_on": "device"})],
    ids=lambda x: name_of(x) or str(x),
)
def test_scaler_and_torchs_clipping_as_in_memory(build: type, mode: dict[str, Any], wrapper: type[HostOffload]) -> None:
    results = []
    for offload in (False, True):
        model = model_of()
        params = model.parameters()
        optimizer = wrapper(build, params, **mode) if offload else build(params)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        for step, x in enumerate(torch.randn(5, 8, 16, generator=torch.Generator().manual_seed(1))):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            if step == 2:
                model[0].weight.grad[0, 0] = torch.inf
            if step == 3:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        results.append((snapshot(optimizer), scaler.get_scale()))
        assert not any(hasattr(optimizer, name) for name in ("grad_scale", "found_inf"))
    assert_same(results[1], results[0])


@pytest.mark.parametrize(("wrapper", "calls"), [(HostOffload, 1), (LateHostOffload, 6)], ids=["cpu", "late"])
def test_where_nothing_is_transferred_a_step_is_one_call(wrapper: type[HostOffload], calls: int) -> None:
    """Several calls took up to twice as long on a machine whose cores are all taken."""

    class CountsSteps(torch.optim.SGD):
        steps = 0

        def _init_group(self, *args: Any) -> Any:
            CountsSteps.steps += 1
            return super()._init_group(*args)

    run(lambda p: wrapper(CountsSteps, p, lr=0.1), steps=1)
    assert CountsSteps.steps == calls


def test_out_of_memory_on_the_host_is_raised() -> None:
    class Broken(optim.AdamW):
        def _init_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
            raise torch.OutOfMemoryError("no memory")

    p = nn.Parameter(torch.ones(5))
    optimizer = HostOffload(Broken, [p])
    p.sum().backward()
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert torch.equal(p, torch.ones(5))


# ---- state dicts and groups


@over_modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
def test_a_run_goes_on_from_its_state_dict(mode: str, dtype: torch.dtype) -> None:
    make = lambda params: HostOffload(optim.AdamW8bit, params, min_8bit_size=0, **MODES[mode])  # noqa: E731
    _, optimizer, model = run(make, dtype=dtype)
    state = saved_and_loaded(optimizer.state_dict())
    assert ("host_weight" in state["state"][0]) == (dtype == torch.float16)
    assert ("weight_error" in state["state"][0]) == (dtype == torch.bfloat16)
    model_copy = copy.deepcopy(model)
    resumed = make(model_copy.parameters())
    resumed.load_state_dict(state)
    for m, o in ((model, optimizer), (model_copy, resumed)):
        for loss in losses(m, 1):
            loss.backward()
        o.step()
        o.zero_grad()
    assert_same(snapshot(resumed), snapshot(optimizer))
    assert_same(saved_and_loaded(resumed.state_dict()), saved_and_loaded(optimizer.state_dict()))


def test_state_dicts_are_those_of_the_optimizer_in_memory() -> None:
    _, plain, model = run(lambda params: optim.AdamW8bit(params, min_8bit_size=0))
    _, optimizer, _ = run(lambda params: HostOffload(optim.AdamW8bit, params, min_8bit_size=0))
    assert_same(optimizer.state_dict(), plain.state_dict())
    plain.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    half = HostOffload(optim.AdamW8bit, model.to(torch.float16).parameters(), min_8bit_size=0)
    half.load_state_dict(plain.state_dict())
    for w in half._weights.values():
        assert torch.equal(w.host_param, w.p.float())


def test_a_state_dict_that_does_not_fit_is_refused() -> None:
    _, optimizer, _ = run(lambda params: HostOffload(optim.AdamW, params), dtype=torch.float16)
    before = snapshot(optimizer)
    state = optimizer.state_dict()
    wrong = {**state, "state": {**state["state"], 0: {**state["state"][0], "host_weight": torch.zeros(3)}}}
    with pytest.raises(
        ValueError, match=r"host_weight .* does not fit parameter 0: its shape is \(3,\), expected \(16, 16\)"
    ):
        optimizer.load_state_dict(wrong)
    with pytest.raises(ValueError, match="not one of memkern's AdamW"):
        optimizer.load_state_dict({**state, "param_groups": [{"params": state["param_groups"][0]["params"]}]})
    assert_same(snapshot(optimizer), before)


def test_a_group_that_is_refused_is_not_added() -> None:
    optimizer = HostOffload(optim.AdamW, [nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="weight_decay must be 0 or more and finite, got -1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "weight_decay": -1})
    assert len(optimizer.param_groups) == len(optimizer.inner.param_groups) == len(optimizer._weights) == 1
