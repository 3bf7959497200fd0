"""Every scheduler of torch sets every optimizer's options as torch's: also in runs that are resumed or compiled."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from memkern import optim
from tests.support.helpers import OPTIMIZERS, assert_same, name_of, snapshot
from tests.support.schedulers import SCHEDULERS

SCHEDULED = ("lr", "betas", "momentum")  # the options that schedulers write


def torch_counterpart(build: type) -> tuple[type, dict[str, Any], bool]:
    """torch's class with the same scheduled options, options that make both alike, and whether both step alike."""
    name = build.__name__.removesuffix("8bit")
    is_8bit = build.__name__.endswith("8bit")
    if name in ("Muon", "Adam", "AdamW"):
        return getattr(torch.optim, name), {}, not is_8bit
    if name in ("SGD", "LARS"):
        return torch.optim.SGD, {"momentum": 0.9}, name == "SGD" and not is_8bit
    return torch.optim.AdamW, {"betas": (0.9, 0.99)}, False


def train(optimizer: Any, scheduler: Any, first: int = 0, steps: int = 5, step: Any = None) -> list[dict[str, Any]]:
    """The options that schedulers write, at each step."""
    options_by_step = []
    for seed in range(first, first + steps):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        (step or optimizer.step)()
        optimizer._opt_called = True  # a compiled step does not set it, and the scheduler would warn
        group = optimizer.param_groups[0]
        options_by_step.append(
            {key: copy.deepcopy(group[key]) for key in SCHEDULED if key in group} | {"lr": float(group["lr"])}
        )
        plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        scheduler.step(*([1.0] if plateau else []))
    return options_by_step


def params() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(9)
    return [torch.nn.Parameter(torch.randn(16, 24, generator=generator))]


def test_the_table_has_every_scheduler() -> None:
    assert {*SCHEDULERS} == {*lr_scheduler.__all__} - {LRScheduler.__name__}


# class, scheduler, whether lr is a tensor: every scheduler with one class, and one that writes all options with each
SET = [
    *((optim.AdamW, name, is_tensor) for name in SCHEDULERS for is_tensor in (False, True)),
    *((build, "OneCycleLR", False) for build in (*OPTIMIZERS, optim.Muon, optim.Muon8bit)),
]


@pytest.mark.parametrize(("build", "name", "tensor_lr"), SET, ids=name_of)
def test_a_scheduler_sets_the_options_of_torchs_optimizer(build: Any, name: str, tensor_lr: bool) -> None:
    torch_class, options, same_algorithm = torch_counterpart(build)
    plain = {} if torch_class is torch.optim.Muon else {"foreach": False}
    lr = [torch.tensor(1e-2, dtype=torch.float64) if tensor_lr else 1e-2 for _ in range(2)]
    ours, theirs = build(params(), lr=lr[0], **options), torch_class(params(), lr=lr[1], **options, **plain)
    cycled = [{key for key in ("betas", "momentum") if key in o.defaults} for o in (ours, theirs)]
    assert cycled[0] == cycled[1]
    path, expected = (train(o, SCHEDULERS[name](o)) for o in (ours, theirs))
    assert [{key: at_step[key] for key in expected[0]} for at_step in path] == expected
    assert len({at_step["lr"] for at_step in path}) > 1
    if same_algorithm:
        p, q = ours.param_groups[0]["params"][0], theirs.param_groups[0]["params"][0]
        # The same formula in another order of operations, as in test_numerics.
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.pairwise
@pytest.mark.parametrize("name", ["OneCycleLR", "SequentialLR", "ReduceLROnPlateau"])
@pytest.mark.parametrize("tensors", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("build", [optim.AdamW8bit, optim.SGD, optim.Muon], ids=name_of)
def test_a_run_that_is_saved_goes_on(build: type, tensors: bool, name: str) -> None:
    """Also where options are tensors, some of which a scheduler replaces."""
    options = {"lr": 1e-2, **torch_counterpart(build)[1]}
    if tensors:
        options["lr"] = torch.tensor(1e-2)
        options |= {"betas": (torch.tensor(0.9), torch.tensor(0.99))} if build is optim.AdamW8bit else {}
    uninterrupted = build(params(), **copy.deepcopy(options))
    scheduler = SCHEDULERS[name](uninterrupted)
    train(uninterrupted, scheduler, steps=3)
    file = io.BytesIO()
    torch.save((uninterrupted.param_groups[0]["params"][0], uninterrupted.state_dict(), scheduler.state_dict()), file)
    file.seek(0)
    p, state, scheduler_state = torch.load(file, weights_only=False)
    resumed = build([p], **copy.deepcopy(options))
    resumed_scheduler = SCHEDULERS[name](resumed)
    resumed.load_state_dict(state)
    resumed_scheduler.load_state_dict(scheduler_state)
    assert train(resumed, resumed_scheduler, 3, 2) == train(uninterrupted, scheduler, 3, 2)
    assert_same(snapshot(resumed), snapshot(uninterrupted))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("build", "name", "cycles"),  # cycles: whether the scheduler changes betas or momentum too
    [(optim.AdamW, "LinearLR", False), (optim.AdamW, "OneCycleLR", True)],
)
def test_a_compiled_step_follows_a_scheduler(build: type, name: str, cycles: bool) -> None:
    """A changing lr compiles once more, a changing beta or momentum at each of its changes, as in torch.optim."""

    def run(compiles: bool) -> Any:
        optimizer: Any = build(params(), lr=1e-2)
        step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager") if compiles else None
        path = train(optimizer, SCHEDULERS[name](optimizer), steps=4, step=step)
        return path, snapshot(optimizer)

    assert_same(run(True), run(False))
    assert counters["stats"]["unique_graphs"] == (4 if cycles else 2)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("first", [0.9, torch.tensor(0.9)], ids=["one of each", "tensors"])
def test_betas_that_are_tensors_are_read_by_each_compiled_step(first: Any) -> None:
    def run(compiles: bool) -> Any:
        second = torch.tensor(0.99)
        optimizer = optim.AdamW(params(), lr=1e-2, betas=(first, second))
        step = torch.compile(optimizer.step, backend="aot_eager") if compiles else optimizer.step
        for value in (0.99, 0.9, 0.5):
            second.fill_(value)
            optimizer.param_groups[0]["params"][0].grad = torch.full((16, 24), value)
            step()
        return snapshot(optimizer)["params"]

    assert_same(run(True), run(False))


def test_one_beta_of_each_kind_is_converted() -> None:
    betas: tuple[Any, Tensor] = (0.9, torch.tensor(0.99))
    optimizer = optim.AdamW(params(), lr=1e-2, betas=betas)
    train(optimizer, lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=9), steps=2)
    saved = optim.to_torch_state_dict(optimizer)
    assert [type(b) for b in saved["param_groups"][0]["betas"]] == [float, float]
    loaded = optim.AdamW(params())
    loaded.load_state_dict(optim.from_torch_state_dict(loaded, saved))
    converted, expected = ({**o.state_dict()["state"][0]} for o in (loaded, optimizer))
    assert_same({key: converted[key] for key in expected}, expected)


def test_muons_option_betas_is_in_every_group_and_no_scheduler_cycles_it() -> None:
    """They are AdamW's betas; also after a copy."""
    (p,), (q,), (r,) = params(), params(), params()
    groups: list[dict[str, Any]] = [{"params": [p]}, {"params": [q], "algorithm": "adamw", "lr": 1e-3}]
    optimizer = optim.Muon(groups, lr=0.02, betas=(0.8, 0.9))
    train(optimizer, lr_scheduler.OneCycleLR(optimizer, [0.02, 1e-3], total_steps=9), steps=2)
    copied = copy.deepcopy(optimizer)
    copied.add_param_group({"params": [r], "algorithm": "adamw", "lr": 1e-3})
    assert [group["betas"] for group in copied.param_groups] == [(0.8, 0.9)] * 3
    momenta = [group["momentum"] for group in copied.param_groups]
    assert momenta[0] == momenta[1] != 0.95
