"""Random programs: HostOffload in each mode does what the optimizer itself does, whatever comes between its calls."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memkern import optim
from memkern.optim import HostOffload, StepInBackward
from tests.support.helpers import assert_same, snapshot
from tests.support.late_transfers import LateHostOffload
from tests.support.offloaded import MODES, ON_DEVICE

BUILDS = [optim.AdamW8bit, optim.Lion8bit, optim.SGD8bit, optim.LAMB8bit, optim.AdamW]
SHAPES = [(64, 64), (40, 100), (33,), (8, 4, 3, 3), (70000,), (16, 300)]
VALUES: dict[str, list[Any]] = {
    "lr": [1e-3, 1e-2, 0.1],
    "betas": [(0.9, 0.99), (0.5, 0.9)],
    "weight_decay": [0.0, 0.1],
    "codec": ["power", "dynamic"],
    "block_size": [64, 128, 256],
    "state_bits": [8, 32],
    "min_8bit_size": [0, 4096],
    "max_grad_norm": [None, 0.1, 1.0],
}


class Program:
    """A model, its optimizer, and what is done to them. ``choice``: the same for the same seed."""

    def __init__(self, seed: int, make: Callable[..., Any], mode: str, build: type) -> None:
        self.choice, self.in_backward = random.Random(seed), "backward" in mode
        self.generator = torch.Generator().manual_seed(seed)
        self.model = nn.ParameterList(self.parameter() for _ in range(self.choice.randint(2, 5)))
        self.optimizer = make(build, [*self.model], lr=1e-2, weight_decay=0.01)
        self.saved: list[Any] = []

    def parameter(self) -> nn.Parameter:
        return nn.Parameter(torch.randn(self.choice.choice(SHAPES), generator=self.generator))

    def set_option(self) -> None:
        name = self.choice.choice([*VALUES])
        value = self.choice.choice(VALUES[name])
        if name in self.optimizer.param_groups[0] and not (self.in_backward and name == "max_grad_norm"):
            for group in self.optimizer.param_groups:
                group[name] = torch.tensor(value) if name == "lr" and value == 0.1 else value

    def fill_lr(self) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(0.05)

    def save(self) -> None:
        self.saved.append(dict(sorted(copy.deepcopy(self.optimizer.state_dict()["state"]).items())))

    def load(self) -> None:
        """Through a file that makes tensors contiguous."""
        state_dict = copy.deepcopy(self.optimizer.state_dict())
        for state in state_dict["state"].values():
            state.update({key: x.contiguous() for key, x in state.items()})
        self.optimizer.load_state_dict(state_dict)

    def copy(self) -> None:
        copy.deepcopy(self.optimizer)

    def add(self) -> None:
        self.model.append(self.parameter())
        self.optimizer.add_param_group({"params": [self.model[-1]]})

    def thaw(self) -> None:
        for p in self.model:
            p.requires_grad_()

    def freeze(self) -> None:
        self.choice.choice([*self.model]).requires_grad_(False)

    def edit(self) -> None:
        with torch.no_grad():
            self.choice.choice([*self.model]).mul_(0.9)

    def change_memory_format(self) -> None:
        p = self.choice.choice([*self.model])
        if p.dim() == 4:
            p.data = p.data.contiguous(memory_format=torch.channels_last)

    def act(self, between: bool = False) -> None:
        """Some of these. ``between``: backward() and step()."""
        any_time = [self.fill_lr, self.save, self.load, self.copy, self.add, self.thaw, *[self.set_option] * 2]
        others = [self.freeze, self.edit, self.change_memory_format]
        for _ in range(self.choice.randint(0, 2)):
            self.choice.choice(any_time if between else any_time + others)()

    def step(self) -> None:
        self.act()
        used = [p for p in self.model if self.choice.random() < 0.85 and p.requires_grad]
        if used:
            products = [(p * torch.randn(p.shape, generator=self.generator)).sum() for p in used]
            sum(products).backward()  # type: ignore[union-attr]
        for p in self.model:
            if self.choice.random() < 0.1 and not any(p is q for q in used):
                p.grad = torch.ones_like(p)
        self.act(between=True)
        self.optimizer.step()
        self.act()
        self.optimizer.zero_grad()

    def run(self) -> Any:
        for _ in range(5):
            self.step()
        return [*self.model], snapshot(self.optimizer)["states"], self.saved


@pytest.mark.pairwise
@pytest.mark.full
@pytest.mark.parametrize("wrapper", [HostOffload, LateHostOffload], ids=["cpu", "late"])
@pytest.mark.parametrize("mode", [*MODES, *ON_DEVICE])
@pytest.mark.parametrize("build", BUILDS)
def test_random_programs(build: type, mode: str, wrapper: type[HostOffload], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memkern.optim.offload.host_weights.BUCKET_ELEMENTS", 3000)
    monkeypatch.setattr("memkern.optim.offload.device.BUCKET_BYTES", 10000)
    options = (MODES | ON_DEVICE)[mode]

    def offloaded(build: type, params: Any, **given: Any) -> Any:
        return wrapper(build, params, **options, **given)

    def plain(build: Any, params: Any, **given: Any) -> Any:
        return StepInBackward(build, params, **given) if "backward" in mode else build(params, **given)

    for seed in range(15):
        expected = Program(seed, plain, mode, build).run()
        found = Program(seed, offloaded, mode, build).run()
        assert_same(found[0], expected[0], f"seed {seed}")
        assert_same(found[2], expected[2], f"seed {seed}")
