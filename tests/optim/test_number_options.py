"""Options may be NumPy's numbers or 0-dim tensors, as files, RLlib's set_state and schedules make them."""

from __future__ import annotations

import copy
from collections import UserList
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memkern import optim
from memkern.optim.checks import READ_AT_EACH_STEP
from tests.support.generic_optimizers import saved_and_loaded
from tests.support.helpers import EIGHT_BIT, assert_same, name_of, snapshot

# Options by class, beside its defaults.
LARS = {"trust_coeff": 0.25, "dampening": 0.25, "layers": 2, "trust_bounds": (0.5, 8.0)}
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.5, "dampening": 0.25},
    "LAMB": {"layers": 2, "trust_bounds": (0.5, 8.0)},
    "LARS": LARS,
    "Muon": {"split": (32, 32)},
}
# Each turns an option, a Python number or str, into another type.
KINDS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda x: {bool: np.bool_, int: np.int64, float: np.float64, str: np.str_}[type(x)](x),
    "float32": lambda x: np.float32(x) if type(x) is float else x,
    "arrays": lambda x: x if type(x) is str else np.array(x),
    "tensors": lambda x: x if type(x) is str else torch.tensor(x, dtype=torch.float64 if type(x) is float else None),
    "small tensors": lambda x: torch.tensor(x) if type(x) is float else x,
}


def convert(x: Any, kind: Callable[[Any], Any]) -> Any:
    if isinstance(x, tuple):
        return tuple(convert(y, kind) for y in x)
    return x if x is None else kind(x)


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(64, 80, generator=generator)) for _ in range(2)]


def step(optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


def all_options(build: Any) -> dict[str, Any]:
    """All options of a class: its defaults, where lr, betas and the like are numbers that float32 holds exactly."""
    class_options = OPTIONS.get(build.__name__.removesuffix("8bit"), {})
    group = build(parameters(), **class_options).param_groups[0]
    options = {key: x for key, x in group.items() if key not in ("params", "decoupled_weight_decay")}
    exact = {"lr": 2.0**-10, "betas": (0.5, 0.75), "eps": 2.0**-20, "weight_decay": 0.125, "max_grad_norm": 0.5}
    exact |= {"ns_coefficients": (3.5, -4.75, 2.0), "momentum": 0.5}
    return options | {key: x for key, x in exact.items() if key in options}


# ---- the ways to set options


def by_arguments(build: Any, options: dict[str, Any]) -> Any:
    arguments = {key: x for key, x in options.items() if key in build.__signature__.parameters}
    return build(parameters(), **arguments)


def by_group(build: Any, options: dict[str, Any]) -> Any:
    norm = options["max_grad_norm"]
    return build([{"params": parameters(), **options}], max_grad_norm=norm)


def by_assignment(build: Any, options: dict[str, Any]) -> Any:
    optimizer = by_group(build, {**options, "lr": 0.0})
    optimizer.param_groups[0].update(options)
    return optimizer


def by_state_dict(build: Any, options: dict[str, Any]) -> Any:
    optimizer = by_group(build, {key: x for key, x in options.items() if key == "max_grad_norm"})
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0].update(options)
    optimizer.load_state_dict(state)
    return optimizer


@pytest.mark.pairwise
@pytest.mark.parametrize("make", [by_arguments, by_group, by_assignment, by_state_dict], ids=name_of)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("build", [*EIGHT_BIT, optim.Muon8bit], ids=name_of)
def test_numbers_of_every_kind_give_the_same_bits(build: type, kind: str, make: Callable[..., Any]) -> None:
    options = all_options(build)
    results = []
    for typed_options in (options, {key: convert(x, KINDS[kind]) for key, x in options.items()}):
        optimizer = make(build, typed_options)
        for number in range(2):
            step(optimizer, number)
        resumed = build(parameters(), **OPTIONS.get(build.__name__.removesuffix("8bit"), {}), max_grad_norm=0.5)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step(resumed, 2)
        results.append((snapshot(optimizer), snapshot(resumed)))
        for key, x in optimizer.param_groups[0].items():
            if key not in ("params", *READ_AT_EACH_STEP) and make is not by_assignment:
                values = x if isinstance(x, tuple) else (x,)
                assert {*map(type, values)} <= {bool, int, float, str, type(None)}, key
    assert_same(*results)


@pytest.mark.pairwise
@pytest.mark.parametrize("make", [by_arguments, by_group, by_assignment, by_state_dict], ids=name_of)
@pytest.mark.parametrize("kind", [list, np.array, UserList], ids=["list", "array", "OmegaConf"])
@pytest.mark.parametrize("build", [optim.AdamW8bit, optim.LARS8bit, optim.Muon8bit], ids=name_of)
def test_sequences_of_every_kind_give_the_same_bits(build: type, kind: Any, make: Callable[..., Any]) -> None:
    """Hydra gives an optimizer OmegaConf's ListConfig, a MutableSequence as UserList is."""
    options = all_options(build)
    results = []
    for typed_options in (options, {key: kind(x) if isinstance(x, tuple) else x for key, x in options.items()}):
        optimizer = make(build, typed_options)
        step(optimizer, 0)
        results.append(snapshot(optimizer))
        if make is not by_assignment:
            saved_and_loaded(optimizer.state_dict())  # loads with weights_only=True
    assert_same(*results)


@pytest.mark.parametrize("kind", [np.array, np.float32, Fraction, torch.tensor], ids=name_of)
def test_a_learning_rate_of_every_kind_may_be_assigned(kind: Any) -> None:
    results = []
    for lr in (0.125, kind(0.125)):
        optimizer = optim.AdamW8bit(parameters())
        step(optimizer, 0)
        optimizer.param_groups[0]["lr"] = lr
        step(optimizer, 1)
        results.append(snapshot(optimizer))
    assert_same(*results)


def test_tensors_are_read_at_each_step() -> None:
    results = []
    for filled in (False, True):
        decay, momentum = torch.tensor(0.5), torch.tensor(0.25)
        optimizer = optim.SGD(parameters(), lr=0.125, weight_decay=decay, momentum=momentum)
        step(optimizer, 0)
        if filled:
            decay.fill_(0.25)
            momentum.fill_(0.75)
        else:
            optimizer.param_groups[0].update(weight_decay=0.25, momentum=0.75)
        step(optimizer, 1)
        results.append(snapshot(optimizer))
    assert_same(*results)


def test_exported_options_are_floats() -> None:
    tensors = {"lr": torch.tensor(0.125), "eps": torch.tensor(2.0**-20), "weight_decay": torch.tensor(0.5)}
    optimizer = optim.AdamW8bit(parameters(), **tensors)
    step(optimizer, 0)
    (group,) = optim.to_torch_state_dict(optimizer)["param_groups"]
    assert (type(group["eps"]), type(group["weight_decay"])) == (float, float)
