"""HostOffload gives the results of the optimizer without it, also where users or a step change groups and states."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memkern import optim
from memkern.optim import HostOffload, StepInBackward
from tests.support.helpers import assert_same, first_quick, name_of, snapshot
from tests.support.late_transfers import LateHostOffload
from tests.support.offloaded import MODES, ON_DEVICE, over_transfers

COUNT, SHAPE = 4, (20, 16)


def parameters(count: int = COUNT, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(SHAPE, generator=generator)) for _ in range(count)]


def train(optimizer: torch.optim.Optimizer, first: int, end: int, between: Callable[[Any], Any] | None = None) -> None:
    """Steps number ``first`` to ``end - 1``, each with its own gradient. ``between``: called before each step()."""
    for step in range(first, end):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 + step)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        sum((p.float() * torch.randn(SHAPE, generator=generator)).sum() for p in params).backward()  # type: ignore[union-attr]
        if between is not None:
            between(optimizer)
        optimizer.step()


# ---- what a step changes in groups: classes that differ in where their groups have a number that each step changes


class Counting(torch.optim.Optimizer):
    """SGD with momentum that counts its steps in its groups, as apex's and TransformerEngine's Adam do."""

    group_state: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, **copy.deepcopy(self.group_state)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            count = self.count(group)
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    m.lerp_(p.grad, 0.1)
                    p.sub_(m / (1 - 0.9**count), alpha=group["lr"])

    def count(self, group: dict[str, Any]) -> float:
        group["step"] = group.get("step", 0) + 1
        return group["step"]


class Declared(Counting):
    group_state = {"step": 0}  # noqa: RUF012


class InPlace(Counting):
    group_state = {"step": torch.tensor(0.0)}  # noqa: RUF012

    def count(self, group: dict[str, Any]) -> float:
        return float(group["step"].add_(1))


class Nested(Counting):
    group_state = {"progress": {"steps": [0]}}  # noqa: RUF012

    def count(self, group: dict[str, Any]) -> float:
        group["progress"]["steps"][0] += 1
        return group["progress"]["steps"][0]


class OfAllGradients(Counting):
    """Like Prodigy's d: one number, computed from all parameters' gradients."""

    group_state = {"d": 1.0}  # noqa: RUF012

    def count(self, group: dict[str, Any]) -> float:
        norms = sum(float(p.grad.norm()) for p in group["params"] if p.grad is not None)
        group["d"] = max(group["d"], norms)
        return group["d"]


over_classes = pytest.mark.parametrize("build", [Counting, Declared, InPlace, Nested, OfAllGradients], ids=name_of)


@over_classes
@over_transfers
@pytest.mark.parametrize("gradients", [False, True])
def test_numbers_in_groups_are_as_without_offload(build: type, wrapper: type[HostOffload], gradients: bool) -> None:
    make = lambda p: wrapper(build, p, offload_gradients=gradients)  # noqa: E731
    for resumes in (False, True):
        results = []
        for new in (build, make):
            optimizer = new([{"params": parameters(2)}, {"params": parameters(2, 1), "lr": 1e-3}])
            train(optimizer, 0, 3)
            if resumes:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = new([{"params": group["params"]} for group in optimizer.param_groups])
                optimizer.load_state_dict(state)
            train(optimizer, 3, 6)
            results.append((snapshot(optimizer), optimizer.state_dict()))
        assert_same(*results)


@over_classes
def test_a_class_that_keeps_numbers_in_its_groups_cannot_be_stepped_by_parameter(build: type) -> None:
    name = next(iter(build.group_state), "step")  # type: ignore[attr-defined]
    optimizer = StepInBackward(build, parameters())
    with pytest.raises(RuntimeError, match=rf"StepInBackward takes no {build.__name__}, whose step changes {name} of"):
        train(optimizer, 0, 1)


def test_a_class_that_keeps_nothing_in_its_groups_can_be_stepped_by_parameter() -> None:
    class Plain(Counting):
        def count(self, group: dict[str, Any]) -> float:
            return 1.0

    results = []
    for make in (Plain, lambda p: StepInBackward(Plain, p)):
        params = parameters()
        train(make(params), 0, 3)
        results.append(params)
    assert_same(*results)


# ---- groups that change


def assign_group(optimizer: Any) -> None:
    """Assigns param_groups a new list with one more group, as Lightning's BaseFinetuning does when it resumes."""
    group = {**optimizer.param_groups[0], "params": parameters(2, 1), "lr": 3e-3}
    optimizer.param_groups = [*optimizer.param_groups, group]


def set_list(change: Callable[[list[Any]], list[Any]]) -> Callable[[Any], None]:
    def edit(optimizer: Any) -> None:
        group = optimizer.param_groups[0]
        group["params"] = change(group["params"])

    return edit


def to_the_other_group(optimizer: Any) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop(0))


def add_group(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": parameters(1, 1), "lr": 3e-3})


def take_out_and_add(optimizer: Any) -> None:
    """Moves a parameter to a new group some steps later, as callbacks that unfreeze layers do."""
    p = optimizer.param_groups[0]["params"].pop()
    train(optimizer, 3, 5)
    optimizer.add_param_group({"params": [p]})


def come_back(optimizer: Any) -> None:
    """Leaves a parameter out of its group for some steps."""
    params = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = params[1:]
    train(optimizer, 3, 5)
    optimizer.param_groups[0]["params"] = params


def replace_an_entry(optimizer: Any) -> None:
    state = optimizer.state[optimizer.param_groups[0]["params"][1]]
    state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def new_key(optimizer: Any) -> None:
    optimizer.param_groups[0]["initial_lr"] = optimizer.param_groups[0]["lr"] = 5e-3
    optimizer.param_groups[1].pop("name")


def transpose(optimizer: Any) -> None:
    p = optimizer.param_groups[0]["params"][1]
    p.data = p.data.t().contiguous().t()


def leave_gaps(optimizer: Any) -> None:
    p = optimizer.param_groups[0]["params"][1]
    p.data = torch.zeros(SHAPE[0], 2 * SHAPE[1])[:, ::2].copy_(p.data)


def set_options(**options: Any) -> Callable[[Any], None]:
    """Sets options in all groups that have them."""

    def edit(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group.update((name, copy.copy(x)) for name, x in options.items() if name in group)

    return edit


CHANGES: dict[str, Callable[[Any], Any]] = {
    "group assigned": assign_group,
    "group dropped": lambda o: setattr(o, "param_groups", o.param_groups[:1]),
    "removed": set_list(lambda params: params[1:]),
    "all removed": set_list(lambda params: []),
    "extended": lambda o: o.param_groups[0]["params"].extend(parameters(2, 1)),
    "in place of others": set_list(lambda params: [nn.Parameter(p.detach().clone()) for p in params]),
    "another order": set_list(lambda params: params[::-1]),
    "to the other group": to_the_other_group,
    "group added": add_group,
    "taken out and added": take_out_and_add,
    "come back": come_back,
    "states cleared": lambda o: o.state.clear(),
    "one state cleared": lambda o: o.state.pop(o.param_groups[0]["params"][1]),
    "an entry of a state replaced": replace_an_entry,
    "keys of groups": new_key,
    "frozen": lambda o: o.param_groups[0]["params"][1].requires_grad_(False),
    "another memory format": transpose,
    "gaps": leave_gaps,
    "codes": set_options(codec="dynamic", block_size=64),
    "bits": set_options(state_bits=32),
    "lr, a tensor": set_options(lr=torch.tensor(0.05)),
}


def train_with_change(make: Callable[[Any], Any], change: Callable[[Any], Any], after: str) -> Any:
    """Parameters after and before the change, the groups' options, and the states, three steps after the change.

    after: what the optimizer does right after the change: it is "saved" and loaded, "copied", or only "stepped".
    """
    optimizer = make([{"params": parameters(2), "name": "a"}, {"params": parameters(2, 7), "name": "b"}])
    before = [p for group in optimizer.param_groups for p in group["params"]]
    train(optimizer, 0, 3)
    change(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p in {*before} - {*params}:  # state_dict() has no number for a state whose parameter is in no group
        if after == "saved":
            optimizer.state.pop(p, None)
    if after == "saved":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif after == "copied":
        optimizer = copy.deepcopy(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
    train(optimizer, 5, 8)
    options = [{key: x for key, x in group.items() if key != "params"} for group in optimizer.param_groups]
    return params, before, options, [dict(optimizer.state.get(p, {})) for p in params]


# name: class of HostOffload, class that it has inside, mode
WRAPPED: dict[str, tuple[type[HostOffload], Any, str]] = {
    **{f"late, {mode}": (LateHostOffload, optim.AdamW8bit, mode) for mode in (*MODES, *ON_DEVICE)},
    "cpu": (HostOffload, optim.AdamW8bit, "default"),
    "cpu, torch's": (HostOffload, torch.optim.AdamW, "default"),
    "late, torch's": (LateHostOffload, torch.optim.AdamW, "offload_gradients"),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("after", first_quick(["stepped", "saved", "copied"]))
@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_groups_step_alike(change: str, wrapped: str, after: str) -> None:
    wrapper, build, mode = WRAPPED[wrapped]
    options = {"min_8bit_size": 0} if build is optim.AdamW8bit else {}
    expected = train_with_change(lambda p: build(p, lr=1e-2, **options), CHANGES[change], after)
    make = lambda p: wrapper(build, p, lr=1e-2, **(MODES | ON_DEVICE)[mode], **options)  # noqa: E731
    assert_same(train_with_change(make, CHANGES[change], after), expected)


def load_contiguous(optimizer: Any) -> None:
    """Loads the state_dict with contiguous tensors, as files of safetensors have them."""
    state_dict = copy.deepcopy(optimizer.state_dict())
    for state in state_dict["state"].values():
        state.update({key: x.contiguous() for key, x in state.items()})
    optimizer.load_state_dict(state_dict)


BETWEEN: dict[str, Callable[[Any], Any]] = {
    "saved": lambda o: o.state_dict(),
    "copied": copy.deepcopy,
    "loaded": load_contiguous,
    "group added": lambda o: o.add_param_group({"params": parameters(1, 5)}),
    "lr": set_options(lr=0.05),
    "bits": set_options(state_bits=32),
    "clipped": set_options(max_grad_norm=0.1),
    "zeroed": lambda o: o.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize(
    ("change", "mode"),
    [(c, m) for c in BETWEEN for m in (*MODES, *ON_DEVICE) if c not in ("clipped", "zeroed") or "backward" not in m],
)
def test_changes_between_backward_and_step_change_no_bit(change: str, mode: str) -> None:
    in_backward = "backward" in mode
    results = []
    for offloads in (False, True):
        new: Any = optim.AdamW8bit
        if offloads:
            new = functools.partial(LateHostOffload, optim.AdamW8bit, **(MODES | ON_DEVICE)[mode])
        elif in_backward:
            new = functools.partial(StepInBackward, optim.AdamW8bit)
        optimizer = new(parameters(), lr=1e-2, min_8bit_size=0)
        train(optimizer, 0, 2)
        train(optimizer, 2, 4, BETWEEN[change])
        train(optimizer, 4, 5)
        results.append(snapshot(optimizer))
    assert_same(*results)


def test_parameters_in_place_of_others_have_their_fp32_weights() -> None:
    model = nn.Linear(64, 64).to(torch.bfloat16)
    optimizer = LateHostOffload(optim.AdamW8bit, model.parameters(), lr=1e-4)
    model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    before = optim.to_fp32_state_dict(model, optimizer)
    assert not torch.equal(before["weight"], model.weight.float())
    model.weight = nn.Parameter(model.weight.detach().clone())
    optimizer.param_groups[0]["params"] = [*model.parameters()]
    assert_same(optim.to_fp32_state_dict(model, optimizer), before)


def test_an_export_converts_no_states() -> None:
    """The option may change back before the next step."""
    model = nn.Linear(64, 64).half()
    optimizer = LateHostOffload(optim.Lion8bit, model.parameters(), lr=1e-4)
    model(torch.ones(2, 64, dtype=torch.float16)).sum().backward()
    optimizer.step()
    before = copy.deepcopy([*optimizer.state.values()])
    optimizer.param_groups[0]["codec"] = "dynamic"
    optim.to_fp32_state_dict(model, optimizer)
    assert_same([*optimizer.state.values()], before)


@over_transfers
def test_the_gradient_of_a_parameter_that_left_the_groups_stays_on_the_device(wrapper: type[HostOffload]) -> None:
    """Its gradient is not moved to the host, since another optimizer may step the parameter."""
    a, b = parameters(2)
    optimizer = wrapper(optim.AdamW, [a, b], offload_gradients=True)
    train(optimizer, 0, 1)
    optimizer.param_groups[0]["params"] = [b]
    (a.sum() + b.sum()).backward()
    assert a.grad is not None
    assert b.grad is None


def test_a_group_that_is_refused_changes_nothing() -> None:
    params = parameters()
    optimizer = LateHostOffload(optim.AdamW8bit, params, lr=1e-2)
    train(optimizer, 0, 1)
    before = copy.deepcopy(params)
    optimizer.param_groups = [*optimizer.param_groups, {**optimizer.param_groups[0], "params": [], "block_size": 3}]
    with pytest.raises(ValueError, match="block_size must be a multiple of 8"):
        train(optimizer, 1, 2)
    assert_same(params, before)
    optimizer.param_groups.pop()
    train(optimizer, 1, 2)
    assert float(optimizer.state[params[0]]["step"]) == 2


def test_a_frozen_group_that_is_unfrozen_trains() -> None:
    """While frozen, the group has no trainable fp32 parameter, so that HostOffload turns on its master_weights."""
    frozen = parameters(2)
    for p in frozen:
        p.requires_grad_(False)
    optimizer = HostOffload(optim.AdamW8bit, [{"params": parameters(1)}, {"params": frozen}])
    train(optimizer, 0, 1)
    for p in frozen:
        p.requires_grad_()
    train(optimizer, 1, 2)
    assert float(optimizer.state[frozen[0]]["step"]) == 1
