"""Runs random programs of optimizer steps and edits on sharded parameters, and compares them with whole tensors."""

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
from tests.support.sharded import full_tensor, muon_groups

# What a program draws from: optimizers, shapes of parameters, values of options.
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
STEPS = 5  # of a program
Place = Callable[[Tensor], Tensor]


def _sharded(mesh: Any, *placements: Any) -> Place:
    return lambda x: distribute_tensor(x, mesh, [*placements], src_data_rank=None)


def places() -> list[Place]:
    """Functions that place a parameter: the first shards it over every rank, the last leaves it a plain tensor."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
    placers = [_sharded(mesh, Shard(0)), _sharded(mesh, Shard(1)), _sharded(mesh, Replicate())]
    if world == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        placers += [_sharded(square, *placements) for placements in ((Replicate(), Shard(0)), (Shard(0), Shard(1)))]
        placers += [_sharded(square["a"], Shard(0)), _sharded(square["b"], Shard(0))]
    return [*placers, torch.clone]


class Program:
    """An optimizer, its steps, and edits between steps. A seed draws the same program on each rank and in one process.

    places: functions that place a parameter on a mesh; with None, this rank runs the program on whole tensors.
    """

    def __init__(self, seed: int, places: list[Place] | None) -> None:
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.is_unsharded = places is None  # whole tensors, without other ranks
        self.results: list[Any] = []
        self.drawn_place: dict[int, int] = {}  # by a parameter's number
        self.number_of: dict[Tensor, int] = {}
        self.places = places
        build = self.rng.choice(BUILDS)
        self.is_muon = issubclass(build, optim.Muon)
        self.can_clip = self.rng.random() < 0.3  # whether max_grad_norm may be set
        self.is_exact = not self.can_clip and build not in (optim.LAMB8bit, optim.LARS8bit)  # else _assert_near
        params = [self._parameter(number) for number in range(self.rng.randint(2, 6))]
        groups: list[dict[str, Any]] = [{"params": params}]
        if self.is_muon:
            groups = muon_groups(params)
        self.is_named = self.rng.random() < 0.5
        for group in groups if self.is_named else ():  # the last rank has another order
            named = [(f"p{self.number_of[p]}", p) for p in group["params"]]
            group["params"] = named[::-1] if self.rank == self.world - 1 else named
        self.params = params
        self.offloads = self.rng.random() < 0.25
        options = {"lr": 1e-2, "min_8bit_size": self.rng.choice([0, 4096])}
        if self.can_clip:
            options["max_grad_norm"] = 0.5
        new = functools.partial(optim.HostOffload, build) if self.offloads else build
        bucket_elements = self.rng.choice([1, host_weights.BUCKET_ELEMENTS])  # 1: each parameter has its own bucket
        with patch.object(host_weights, "BUCKET_ELEMENTS", bucket_elements):
            self.optimizer: Any = new(groups, **options)
        self.scheduler: Any = None

    # ---- tensors

    def _parameter(self, number: int) -> Parameter:
        count = len(SHAPES) if number else 2  # number 0 is a matrix with shards on every rank
        shape = SHAPES[self.rng.randrange(count)]
        self.drawn_place[number] = self.rng.randrange(16) if number else 0
        x = torch.randn(shape, generator=self.generator)
        if self.rng.random() < 0.2:
            x = x.bfloat16()
        p = Parameter(self._placed(x, number))
        self.number_of[p] = number
        return p

    def _place_index(self, x: Tensor, number: int) -> int:
        """The index of a parameter's function in places() (also in one process), -1 for one that is a plain tensor."""
        count = 8 if self.world == 4 else 4  # the length of places()
        index = self.drawn_place[number] % count
        if index in (1, 4) and x.dim() < 2:  # in places() these have Shard(1), for which a matrix is needed
            index = 0
        return -1 if index == count - 1 else index

    def _placed(self, x: Tensor, number: int) -> Tensor:
        return x.clone() if self.places is None else self.places[self._place_index(x, number)](x)

    def set_gradients(self) -> None:
        """Draws gradients. In a tenth of the steps an element of one gradient is NaN or infinity (of a plain tensor:
        NaN, on one rank); in another tenth one rank has no gradient of a plain tensor.
        """
        fault, rank = self.rng.random(), self.rng.randrange(self.world)
        victim = self.rng.choice(self.params)
        value = self.rng.choice([torch.nan, torch.inf])
        for p in self.params:
            number = self.number_of[p]
            g = torch.randn(p.shape, generator=self.generator).to(p.dtype)
            element = self.rng.randrange(g.numel())
            is_plain = self._place_index(g, number) == -1
            missing = False
            if p is victim and fault < 0.1:
                # A NaN that one rank has in a plain tensor changes the step of all ranks in two cases: the tensor is
                # a matrix of Muon's, or gradients are clipped by their norm. The run on whole tensors then has the NaN
                # too. An infinity would not do: clipping makes it NaN on its rank, and finite gradients 0 on others.
                clips = self.optimizer.param_groups[0]["max_grad_norm"] is not None
                affects_all = not is_plain or (self.is_unsharded and ((self.is_muon and p.dim() >= 2) or clips))
                if affects_all or self.rank == rank:
                    g.view(-1)[element] = torch.nan if is_plain else value
            elif p is victim and fault < 0.2:
                missing = is_plain and not self.can_clip and self.rank == rank
            all_lack_it = self.rng.random() >= 0.9
            p.grad = None if missing or all_lack_it else self._placed(g, number)

    # ---- edits between two steps

    def set_option(self) -> None:
        """Sets an option of all groups that have it, or of one group."""
        name = self.rng.choice([*OPTIONS])
        value = self.rng.choice(OPTIONS[name])
        if name == "max_grad_norm" and not self.can_clip:
            return
        groups = self.optimizer.param_groups
        if name != "max_grad_norm" and self.rng.random() < 0.4:  # max_grad_norm is one for all groups
            groups = [self.rng.choice(groups)]
        for group in groups:
            if name in group:
                group[name] = value

    def load_own_state_dict(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def load_unsharded_state_dict(self) -> None:
        """Loads the state_dict with whole tensors, as one process saves it; not where parameters are named."""
        if self.is_named:
            return  # ranks would gather tensors in different orders
        state_dict = self.optimizer.state_dict()
        for state in state_dict["state"].values():
            state.update({key: full_tensor(x) for key, x in state.items()})
        self.optimizer.load_state_dict(copy.deepcopy(state_dict))

    def deepcopy(self) -> None:
        old, new = self.params, copy.deepcopy([self.optimizer, self.params, self.scheduler])
        self.optimizer, self.params, self.scheduler = new
        self.number_of = {q: self.number_of[p] for p, q in zip(old, self.params, strict=True)}

    def reorder(self) -> None:
        group = self.rng.choice(self.optimizer.param_groups)
        if not self.offloads:
            group["params"].reverse()

    def move_to_a_group(self) -> None:
        """Moves a group's last parameter to a new group."""
        params = self.rng.choice(self.optimizer.param_groups)["params"]
        if len(params) > 1 and not self.is_muon and not self.offloads and not self.is_named:
            self.optimizer.state_dict()  # so that it notices replaced parameters before one of them is moved
            self.optimizer.add_param_group({"params": [params.pop()], "lr": 0.05})
            self.scheduler = None

    def replace(self) -> None:
        """Replaces a parameter by its copy, as a wrapper does."""
        index = self.rng.randrange(len(self.params))
        old = self.params[index]
        if self.offloads:
            return
        self.params[index] = new = Parameter(old.detach().clone())
        self.number_of[new] = self.number_of[old]
        for group in self.optimizer.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]

    def schedule(self) -> None:
        self.scheduler = SCHEDULERS[self.rng.choice([*SCHEDULERS])](self.optimizer)

    def export(self) -> None:
        """Appends to the results what to_torch_state_dict makes of Adam's states; does nothing for other optimizers."""
        if self.is_named:
            return
        inner = getattr(self.optimizer, "inner", self.optimizer)
        if not isinstance(inner, optim.Adam):
            return
        states = [*optim.to_torch_state_dict(inner)["state"].values()]
        self.results.append([[full_tensor(x) for x in state.values()] for state in states])

    ACTS = (  # set_option is twice as likely
        set_option, set_option, load_own_state_dict, load_unsharded_state_dict, deepcopy, reorder, move_to_a_group,
        replace, schedule, export,
    )  # fmt: skip

    # ---- the program

    def attempt(self, function: Callable[[], Any]) -> None:
        """Calls a function and keeps the type of its error as a result; errors of the connection are raised."""
        try:
            function()
        except (RuntimeError, ValueError, TypeError) as error:
            self.results.append(type(error).__name__)
            if "timed out" in str(error).lower() or "connection" in str(error).lower():
                raise

    def step(self) -> None:
        skipped, rank = self.rng.random() < 0.1, self.rng.randrange(self.world)
        if skipped:  # as GradScaler does that finds an infinite gradient on one rank
            found_inf = float(self.rank == rank or self.is_unsharded)
            self.optimizer.grad_scale, self.optimizer.found_inf = torch.tensor(1.0), torch.tensor(found_inf)
        self.optimizer.step()
        if skipped:
            del self.optimizer.grad_scale, self.optimizer.found_inf
        if self.scheduler is not None:
            self.scheduler.step(*([1.0] if isinstance(self.scheduler, ReduceLROnPlateau) else []))

    def run(self) -> list[Any]:
        for _ in range(STEPS):
            for _ in range(self.rng.randint(0, 2)):
                act = self.rng.choice(self.ACTS)
                self.attempt(lambda act=act: act(self))  # type: ignore[misc]
            self.set_gradients()
            self.attempt(self.step)
            self.results.append([float(group["lr"]) for group in self.optimizer.param_groups])
            self.results.append([full_tensor(p.detach()).clone() for p in self.params])
        states = [self.optimizer.state.get(p, {}) for p in self.params]
        self.results.append([{key: full_tensor(x) for key, x in sorted(state.items())} for state in states])
        return self.results


def _assert_near(results: Any, expected: Any, start: list[Tensor]) -> None:
    """Compares parameters after each step by mean errors: norms summed over shards may change a last bit or a code."""
    for x, y in zip(results, expected, strict=True):
        assert type(x) is type(y)
        is_params = isinstance(x, list) and len(x) == len(start) and all(isinstance(a, Tensor) for a in x)
        for a, b, first in zip(x, y, start, strict=True) if is_params else ():
            assert torch.equal(a.isfinite(), b.isfinite())
            finite = b.isfinite()
            error, moved = (a - b)[finite].abs().float(), (b - first)[finite].abs().float()
            rounding = 2.0**-8 * b[finite].abs().float().mean() if b.dtype == torch.bfloat16 else 1e-6
            # A percent of the way from the start: one code in a hundred elements may be another.
            assert not finite.any() or error.mean() <= 1e-2 * moved.mean() + rounding


def _assert_seed_as_in_one_process(seed: int, placers: list[Place]) -> None:
    program, program_in_one_process = Program(seed, placers), Program(seed, None)
    start = [p.detach().clone() for p in program_in_one_process.params]
    results, expected = program.run(), program_in_one_process.run()
    if program.is_exact:
        assert_same(results, expected)
    else:
        _assert_near(results, expected, start)


def run(first: int, count: int) -> str:
    """Runs the programs of ``count`` seeds; returns the traceback of the first that differs from one process, or ""."""
    warnings.simplefilter("ignore")
    placers, seed = places(), first
    try:
        for seed in range(first, first + count):
            _assert_seed_as_in_one_process(seed, placers)
    except (AssertionError, RuntimeError, ValueError, TypeError):
        return f"seed {seed}: {traceback.format_exc()}"
    return ""
