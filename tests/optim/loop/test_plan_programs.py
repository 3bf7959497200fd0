"""Random programs: steps whose plans are used again are those of plans that are forgotten before each step."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkern import optim
from memkern.optim.state import State
from tests.support.helpers import assert_same, first_full
from tests.support.random_options import OPTIONS, set_option

BUILDS = [
    optim.AdamW8bit, optim.Lion8bit, optim.SGD8bit, optim.LAMB8bit, optim.LARS8bit, optim.Muon8bit, optim.Adam,
]  # fmt: skip
SHAPES = [(64, 64), (40, 100), (33,), (8, 4, 3, 3), (70000,), (16, 300), (128, 32)]
VALUES = OPTIONS | {"stochastic_rounding": [False, True], "layers": [1, 2]}
STEPS = 8


class Program:
    """An optimizer and what is done to it between steps. ``choice``: the same for the same seed."""

    def __init__(self, seed: int, build: Any) -> None:
        self.choice, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        params = [self.parameter() for _ in range(self.choice.randint(2, 5))]
        self.is_muon = build is optim.Muon8bit
        groups: list[dict[str, Any]] = [{"params": params}]
        if self.is_muon:
            groups = [
                {"params": [p for p in params if p.dim() == 2]},
                {"params": [p for p in params if p.dim() != 2], "algorithm": "adamw", "lr": 1e-3},
            ]
        self.optimizer = build(groups, lr=1e-2)
        self.found: list[Any] = []  # parameters after each step, and errors

    def parameter(self) -> nn.Parameter:
        p = torch.randn(self.choice.choice(SHAPES), generator=self.generator)
        if self.choice.random() < 0.2:
            p = p.bfloat16()
        if p.dim() == 2 and self.choice.random() < 0.15:  # with gaps
            p = torch.zeros(p.shape[0], 2 * p.shape[1], dtype=p.dtype)[:, ::2].copy_(p)
        return nn.Parameter(p)

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    # ---- what is done between two steps

    def set_option(self) -> None:
        set_option(self.choice, self.optimizer.param_groups, VALUES)

    def replace_entry(self) -> None:
        if state := self.a_state():
            key = self.choice.choice([*state])
            state[key] = state[key].clone()

    def replace_state(self) -> None:
        p = self.choice.choice(self.params)
        if entries := {key: x.clone() for key, x in self.optimizer.state.get(p, {}).items()}:
            self.optimizer.state[p] = self.choice.choice([dict, State])(entries)

    def exchange_states(self) -> None:
        state, params = self.optimizer.state, [p for p in self.params if p in self.optimizer.state]
        pairs = [(a, b) for i, a in enumerate(params) for b in params[:i] if (a.shape, a.dtype) == (b.shape, b.dtype)]
        if pairs:
            a, b = self.choice.choice(pairs)
            state[a], state[b] = state[b], state[a]

    def take_out(self) -> None:
        self.optimizer.state.pop(self.choice.choice(self.params), None)

    def clear(self) -> None:
        if self.choice.random() < 0.3:
            self.optimizer.state.clear()

    def load(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def copy(self) -> None:
        self.optimizer = copy.deepcopy(self.optimizer)

    def reorder(self) -> None:
        self.choice.choice(self.optimizer.param_groups)["params"].reverse()

    def move_to_a_group(self) -> None:
        params = self.choice.choice(self.optimizer.param_groups)["params"]
        if len(params) > 1 and not self.is_muon:
            self.optimizer.add_param_group({"params": [params.pop()], "lr": 0.05})

    def change_memory(self) -> None:
        p = self.choice.choice(self.params)
        if p.dim() == 4:
            p.data = p.data.to(memory_format=self.choice.choice([torch.channels_last, torch.contiguous_format]))
        elif p.dim() == 2 and not self.is_muon:
            p.data = p.data.t().contiguous().t()

    def change_dtype(self) -> None:
        p = self.choice.choice(self.params)
        p.data, p.grad = p.data.to(self.choice.choice([torch.float32, torch.bfloat16])), None

    def cut(self) -> None:
        p = self.choice.choice(self.params)
        if p.dim() == 2 and self.choice.random() < 0.3:
            p.data = p.data[: max(1, p.shape[0] // 2)]

    def a_state(self) -> Any:
        return self.optimizer.state.get(self.choice.choice(self.params))

    # ---- the program

    ACTS = (
        set_option, replace_entry, replace_state, exchange_states, take_out, clear, load, copy, reorder,
        move_to_a_group, change_memory, change_dtype, cut,
    )  # fmt: skip

    def trying(self, function: Any) -> None:
        try:
            function()
        except (RuntimeError, ValueError, TypeError) as error:
            self.found.append(str(error))

    def run(self, forget: bool) -> list[Any]:
        for _ in range(STEPS):
            for _ in range(self.choice.randint(0, 2)):
                act = self.choice.choice(self.ACTS)
                self.trying(lambda act=act: act(self))  # type: ignore[misc]
            for p in self.params:
                g = torch.randn(p.shape, generator=self.generator).to(p.dtype)
                p.grad = g if self.choice.random() < 0.85 else None
            for state in self.optimizer.state.values() if forget else ():
                if isinstance(state, State):
                    state.plan = state._layout = None
            self.trying(self.optimizer.step)
            self.found.append([p.detach().clone() for p in self.params])
        return [*self.found, [dict(self.optimizer.state.get(p, {})) for p in self.params]]


@pytest.mark.full
@pytest.mark.parametrize("part", first_full(range(8), 3))
@pytest.mark.parametrize("build", BUILDS)
def test_random_programs(build: type, part: int) -> None:
    for seed in range(part, 40, 8):
        kept, forgotten = (Program(seed, build).run(forget) for forget in (False, True))
        assert_same(kept, forgotten)
