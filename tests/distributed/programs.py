"""Random programs of optimizer steps and edits on sharded parameters, beside the same programs on one process."""

from __future__ import annotations

import copy
import functools
import random
import traceback
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parameter import Parameter
from torch.optim.lr_scheduler import ReduceLROnPlateau

from memkern import optim
from memkern.optim.offload import host_weights
from tests.support.helpers import assert_same
from tests.support.schedulers import SCHEDULERS
from tests.support.sharded import whole

# What a program chooses from: optimizers, shapes, options and values for them.
BUILDS: list[Any] = [
    optim.AdamW8bit, optim.Adam, optim.Lion8bit, optim.SGD8bit, optim.LAMB8bit, optim.LARS8bit, optim.Muon8bit,
    optim.Muon,
]  # fmt: skip
SHAPES = [(64, 64), (40, 100), (33,), (8, 4, 3, 3), (2, 300), (37, 3, 5), (1001,), (48, 40)]
OPTIONS: dict[str, list[Any]] = {
    "lr": [1e-3, 1e-2],
    "weight_decay": [0.0, 0.1],
    "betas": [(0.9, 0.99), (0.5, 0.9)],
    "codec": ["power", "dynamic"],
    "block_size": [64, 128],
    "state_bits": [8, 32],
    "min_8bit_size": [0, 4096],
    "max_grad_norm": [None, 0.1],
    "amsgrad": [False, True],
}
STEPS = 5
Place = Callable[[Tensor], Tensor]


def _sharded(mesh: Any, *placements: Any) -> Place:
    return lambda x: distribute_tensor(x, mesh, [*placements], src_data_rank=None)


def places() -> list[Place]:
    """Where a parameter may be; the first has shards on every rank, and the last is a plain tensor on each."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
    found = [_sharded(mesh, Shard(0)), _sharded(mesh, Shard(1)), _sharded(mesh, Replicate())]
    if world == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        found += [_sharded(square, *at) for at in ((Replicate(), Shard(0)), (Shard(0), Shard(1)))]
        found += [_sharded(square["a"], Shard(0)), _sharded(square["b"], Shard(0))]
    return [*found, torch.clone]


class Program:
    """An optimizer and what is done to it. The same seed does the same on each rank, and with whole tensors.

    places: where parameters may be; None for whole tensors, which run what this rank runs.
    """

    def __init__(self, seed: int, places: list[Place] | None) -> None:
        self.choice, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.is_alone = places is None
        self.found: list[Any] = []
        self.place_of: dict[int, int] = {}  # by a parameter's number
        self.number_of: dict[Tensor, int] = {}
        self.places = places
        build = self.choice.choice(BUILDS)
        self.is_muon = issubclass(build, optim.Muon)
        self.can_clip = self.choice.random() < 0.3
        self.is_exact = not self.can_clip and build not in (optim.LAMB8bit, optim.LARS8bit)
        params = [self._parameter(number) for number in range(self.choice.randint(2, 6))]
        groups: list[dict[str, Any]] = [{"params": params}]
        if self.is_muon:
            groups = [
                {"params": [p for p in params if p.dim() >= 2]},
                {"params": [p for p in params if p.dim() < 2], "algorithm": "adamw", "lr": 1e-3},
            ]
            groups = [group for group in groups if group["params"]]
        self.is_named = self.choice.random() < 0.5
        for group in groups if self.is_named else ():  # in another order on the last rank
            named = [(f"p{self.number_of[p]}", p) for p in group["params"]]
            group["params"] = named[::-1] if self.rank == self.world - 1 else named
        self.params = params
        self.offloads = self.choice.random() < 0.25
        options = {"lr": 1e-2, "min_8bit_size": self.choice.choice([0, 4096])}
        if self.can_clip:
            options["max_grad_norm"] = 0.5
        new = functools.partial(optim.HostOffload, build) if self.offloads else build
        least = self.choice.choice([1, host_weights.BUCKET_ELEMENTS])  # a bucket of each, or one of all
        with patch.object(host_weights, "BUCKET_ELEMENTS", least):
            self.optimizer: Any = new(groups, **options)
        self.scheduler: Any = None

    # ---- tensors

    def _parameter(self, number: int) -> Parameter:
        # Every program has one that all ranks share.
        count = len(SHAPES) if number else 2
        shape = SHAPES[self.choice.randrange(count)]
        self.place_of[number] = self.choice.randrange(16) if number else 0
        x = torch.randn(shape, generator=self.generator)
        if self.choice.random() < 0.2:
            x = x.bfloat16()
        p = Parameter(self._placed(x, number))
        self.number_of[p] = number
        return p

    def _place(self, x: Tensor, number: int) -> int:
        """The index of a parameter's place, the same with whole tensors: -1 for a plain one."""
        count = 8 if self.world == 4 else 4
        k = self.place_of[number] % count
        if k in (1, 4) and x.dim() < 2:
            k = 0
        return -1 if k == count - 1 else k

    def _placed(self, x: Tensor, number: int) -> Tensor:
        return x.clone() if self.places is None else self.places[self._place(x, number)](x)

    def gradients(self) -> None:
        """Gives parameters gradients; in some steps one is not finite on one rank, or a plain one is missing there."""
        fault, rank = self.choice.random(), self.choice.randrange(self.world)
        victim = self.choice.choice(self.params)
        value = self.choice.choice([torch.nan, torch.inf])
        for p in self.params:
            number = self.number_of[p]
            g = torch.randn(p.shape, generator=self.generator).to(p.dtype)
            at = self.choice.randrange(g.numel())
            is_plain = self._place(g, number) == -1
            missing = False
            if p is victim and fault < 0.1:
                # All ranks skip a step of such a matrix of Muon, and have one norm; other tensors they step alone.
                clips = self.optimizer.param_groups[0]["max_grad_norm"] is not None
                everywhere = not is_plain or (self.is_alone and ((self.is_muon and p.dim() >= 2) or clips))
                if everywhere or self.rank == rank:
                    g.view(-1)[at] = torch.nan if is_plain else value
            elif p is victim and fault < 0.2:
                missing = is_plain and not self.can_clip and self.rank == rank
            kept = self.choice.random() < 0.9
            p.grad = None if missing or not kept else self._placed(g, number)

    # ---- what is done between two steps

    def set_option(self) -> None:
        """Sets an option of all groups that have it, or of one group."""
        name = self.choice.choice([*OPTIONS])
        value = self.choice.choice(OPTIONS[name])
        if name == "max_grad_norm" and not self.can_clip:
            return
        groups = self.optimizer.param_groups
        if name != "max_grad_norm" and self.choice.random() < 0.4:  # of all groups
            groups = [self.choice.choice(groups)]
        for group in groups:
            if name in group:
                group[name] = value

    def load(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def load_whole(self) -> None:
        """Loads the state_dict with whole tensors, as one process has it."""
        if self.is_named:
            return  # it would be gathered in another order on each rank
        state_dict = self.optimizer.state_dict()
        for state in state_dict["state"].values():
            state.update({key: whole(x) for key, x in state.items()})
        self.optimizer.load_state_dict(copy.deepcopy(state_dict))

    def copy(self) -> None:
        ours, new = self.params, copy.deepcopy([self.optimizer, self.params, self.scheduler])
        self.optimizer, self.params, self.scheduler = new
        self.number_of = {q: self.number_of[p] for p, q in zip(ours, self.params, strict=True)}

    def reorder(self) -> None:
        group = self.choice.choice(self.optimizer.param_groups)
        if not self.offloads:
            group["params"].reverse()

    def move_to_a_group(self) -> None:
        params = self.choice.choice(self.optimizer.param_groups)["params"]
        if len(params) > 1 and not self.is_muon and not self.offloads and not self.is_named:
            self.optimizer.state_dict()  # a look at the groups: one that was replaced and then moved would be unknown
            self.optimizer.add_param_group({"params": [params.pop()], "lr": 0.05})
            self.scheduler = None

    def replace(self) -> None:
        """Replaces a parameter by its copy, as a wrapper does."""
        k = self.choice.randrange(len(self.params))
        old = self.params[k]
        if self.offloads:
            return
        self.params[k] = new = Parameter(old.detach().clone())
        self.number_of[new] = self.number_of[old]
        for group in self.optimizer.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]

    def schedule(self) -> None:
        self.scheduler = SCHEDULERS[self.choice.choice([*SCHEDULERS])](self.optimizer)

    def export(self) -> None:
        if self.is_named:
            return
        inner = getattr(self.optimizer, "inner", self.optimizer)
        if not isinstance(inner, optim.Adam):
            return
        states = [*optim.to_torch_state_dict(inner)["state"].values()]
        self.found.append([[whole(x) for x in state.values()] for state in states])

    ACTS = (
        set_option, set_option, load, load_whole, copy, reorder, move_to_a_group, replace, schedule, export,
    )  # fmt: skip

    # ---- the program

    def trying(self, function: Callable[[], Any]) -> None:
        try:
            function()
        except (RuntimeError, ValueError, TypeError) as error:
            self.found.append(type(error).__name__)
            if "timed out" in str(error).lower() or "connection" in str(error).lower():
                raise

    def step(self) -> None:
        skipped, rank = self.choice.random() < 0.1, self.choice.randrange(self.world)
        if skipped:  # as a GradScaler that has found an infinite gradient on one rank
            found = float(self.rank == rank or self.is_alone)
            self.optimizer.grad_scale, self.optimizer.found_inf = torch.tensor(1.0), torch.tensor(found)
        self.optimizer.step()
        if skipped:
            del self.optimizer.grad_scale, self.optimizer.found_inf
        if self.scheduler is not None:
            self.scheduler.step(*([1.0] if isinstance(self.scheduler, ReduceLROnPlateau) else []))

    def run(self) -> list[Any]:
        for _ in range(STEPS):
            for _ in range(self.choice.randint(0, 2)):
                act = self.choice.choice(self.ACTS)
                self.trying(lambda act=act: act(self))  # type: ignore[misc]
            self.gradients()
            self.trying(self.step)
            self.found.append([float(group["lr"]) for group in self.optimizer.param_groups])
            self.found.append([whole(p.detach()).clone() for p in self.params])
        states = [self.optimizer.state.get(p, {}) for p in self.params]
        self.found.append([{key: whole(x) for key, x in sorted(state.items())} for state in states])
        return self.found


def _near(found: Any, expected: Any, start: list[Tensor]) -> None:
    """Parameters after each step, where norms of shards have other last bits, and so a code here and there."""
    for x, y in zip(found, expected, strict=True):
        assert type(x) is type(y)
        is_params = isinstance(x, list) and len(x) == len(start) and all(isinstance(a, Tensor) for a in x)
        for a, b, first in zip(x, y, start, strict=True) if is_params else ():
            assert torch.equal(a.isfinite(), b.isfinite())
            seen = b.isfinite()
            off, moved = (a - b)[seen].abs().float(), (b - first)[seen].abs().float()
            rounding = 2.0**-8 * b[seen].abs().float().mean() if b.dtype == torch.bfloat16 else 1e-6
            assert not seen.any() or off.mean() <= 1e-2 * moved.mean() + rounding


def _run_one(seed: int, there: list[Place]) -> None:
    program, alone = Program(seed, there), Program(seed, None)
    start = [p.detach().clone() for p in alone.params]
    found, expected = program.run(), alone.run()
    if program.is_exact:
        assert_same(found, expected)
    else:
        _near(found, expected, start)


def run(first: int, count: int) -> str:
    """Runs programs of so many seeds; what differed from one process in the first that did, or nothing."""
    warnings.simplefilter("ignore")
    there, seed = places(), first
    try:
        for seed in range(first, first + count):
            _run_one(seed, there)
    except (AssertionError, RuntimeError, ValueError, TypeError):
        return f"seed {seed}: {traceback.format_exc()}"
    return ""
