"""StepInBackward has the bits of the ordinary step, holds two gradients at a time, and refuses what cannot work."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.checkpoint import checkpoint

from memkern import memory, optim
from memkern.nn import LinearCrossEntropy
from memkern.optim import StepInBackward
from tests.support.helpers import EIGHT_BIT, assert_same, name_of, over_kinds, snapshot

VOCABULARY, WIDTH = 50, 32
TORCH_CLASSES = [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop]


class Tied(nn.Module):
    """A language model whose embedding is the last layer too, with blocks that may be checkpointed; returns a loss."""

    def __init__(self, checkpoints: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH, dtype=dtype), nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.GELU())
            for _ in range(3)
        )
        self.loss = LinearCrossEntropy(WIDTH, VOCABULARY, dtype=dtype, chunk_size=16)
        self.loss.linear.weight = self.embedding.weight
        self.checkpoints = checkpoints

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x))
        return self.loss(x[:, :-1], tokens[:, 1:])


def train(
    make: Callable[[Any], torch.optim.Optimizer], steps: int = 4, schedule: bool = False, **options: Any
) -> tuple[dict[str, Any], list[float], torch.optim.Optimizer]:
    """Parameters and states, the losses, the optimizer; ``options``: the model's."""
    torch.manual_seed(0)
    model = Tied(**options)
    optimizer = make(model.parameters())
    scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps + 1) if schedule else None
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randint(VOCABULARY, (4, 9)))
        loss.backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
    return snapshot(optimizer), losses, optimizer


# ---- the same result


# class, its options, the model's options
CASES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    *((build, {"min_8bit_size": 0}, {}) for build in EIGHT_BIT),
    *((build, {}, {}) for build in TORCH_CLASSES),
    *((optim.AdamW, {}, {"dtype": dtype}) for dtype in (torch.bfloat16, torch.float16, torch.float64)),
    *(
        (optim.AdamW8bit, {"min_8bit_size": 0, "master_weights": bits}, {"dtype": torch.bfloat16})
        for bits in ("bf16+16", "bf16+8")
    ),
    (optim.AdamW8bit, {}, {"checkpoints": True}),
]


@pytest.mark.parametrize(("build", "options", "model_options"), CASES, ids=lambda x: name_of(x) or str(x))
def test_has_the_bits_of_the_ordinary_step(build: type, options: dict[str, Any], model_options: dict[str, Any]) -> None:
    options = {"lr": 1e-2, "weight_decay": 0.1, **options}
    expected = train(lambda params: build(params, **options), schedule=True, **model_options)
    result = train(lambda params: StepInBackward(build, params, **options), schedule=True, **model_options)
    assert_same(result[:2], expected[:2])


def test_a_gradient_set_by_hand_waits_for_step() -> None:
    p, q = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    optimizer = StepInBackward(optim.AdamW, [p, q], lr=0.1)
    gradient = torch.ones(5)
    q.grad = gradient
    p.sum().backward()
    assert p.grad is None
    assert q.grad is gradient
    assert torch.equal(q, torch.ones(5))
    optimizer.step()
    assert q.grad is None
    assert_same(q, p)


def test_a_parameter_that_is_unfrozen_later_is_hooked_by_step() -> None:
    p, q = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5), requires_grad=False)
    optimizer = StepInBackward(optim.AdamW, [p, q], lr=0.1)
    q.requires_grad_()
    for has_gradient in (True, False):  # the first step() adds the hook that takes it
        (p.sum() + q.sum()).backward()
        assert (q.grad is not None) == has_gradient
        optimizer.step()
    assert_same(q, p)


# ---- classes, state dicts, copies, hooks


def test_an_object_is_an_instance_of_both_classes() -> None:
    optimizer = StepInBackward(optim.AdamW8bit, Tied().parameters())
    assert isinstance(optimizer, StepInBackward)
    assert isinstance(optimizer, optim.AdamW8bit)
    assert repr(optimizer).startswith("StepInBackward(AdamW8bit) (\nParameter Group 0")
    assert type(optimizer) is type(StepInBackward(optim.AdamW8bit, Tied().parameters()))


def test_state_dicts_are_those_of_the_ordinary_optimizer() -> None:
    expected, _, ordinary = train(optim.AdamW8bit)
    _, _, optimizer = train(lambda params: StepInBackward(optim.AdamW8bit, params))
    ours, theirs = optimizer.state_dict(), ordinary.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert_same(dict(sorted(ours["state"].items())), theirs["state"])  # in the order of first gradients
    loaded = StepInBackward(optim.AdamW8bit, Tied().parameters())
    loaded.load_state_dict(ordinary.state_dict())
    assert_same(snapshot(loaded)["states"], expected["states"])
    ordinary.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_copies_step_in_their_own_backward(duplicate: Callable[[Any], Any]) -> None:
    original = Tied()
    model, optimizer = duplicate((original, StepInBackward(optim.AdamW8bit, original.parameters())))
    model(torch.randint(VOCABULARY, (4, 9))).backward()
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()


def test_an_optimizer_that_is_dropped_steps_no_more() -> None:
    model, tokens = Tied(), torch.randint(VOCABULARY, (4, 9))
    optimizer = StepInBackward(optim.AdamW8bit, model.parameters())
    ref = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert ref() is None
    before = [p.detach().clone() for p in model.parameters()]
    model(tokens).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert_same([*model.parameters()], before)


def test_hooks_of_the_step_run_once_a_step() -> None:
    calls: list[str] = []
    p = nn.Parameter(torch.ones(5))
    optim.AdamW([p])  # torch wraps the step of a class with its first object
    optimizer = StepInBackward(optim.AdamW, [p])
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    p.sum().backward()
    assert not calls
    optimizer.step()
    assert calls == ["before", "after"]


# ---- memory


@pytest.mark.parametrize("checkpoints", [False, True])
def test_no_more_than_two_gradients_are_held(checkpoints: bool) -> None:
    layers, width = 8, 128

    class Deep(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=False) if checkpoints else layer(x)
            return x

    def peak(make: Callable[[Any], torch.optim.Optimizer]) -> int:
        model = Deep(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        optimizer, x = make(model.parameters()), torch.randn(1, width)

        def step() -> None:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # makes the states
        return memory.peak_bytes(step, model, optimizer, x) - memory.tensor_bytes(
            [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
        )

    gradient_bytes = width * width * 4
    activation_bytes = 64 * width * layers  # an upper limit: 16 fp32 rows of a layer's width for each layer
    assert peak(optim.AdamW) >= layers * gradient_bytes
    assert peak(lambda params: StepInBackward(optim.AdamW, params)) <= 2 * gradient_bytes + activation_bytes


# ---- one parameter at a time, in constant time


class VisitCounter(list):  # type: ignore[type-arg]
    """A group's list of parameters that counts how many of them loops have visited."""

    visits = 0

    def __iter__(self) -> Any:
        for x in super().__iter__():
            VisitCounter.visits += 1
            yield x


@pytest.mark.parametrize("build", [optim.AdamW8bit, optim.LAMB8bit, torch.optim.SGD], ids=name_of)
@pytest.mark.parametrize("groups", [1, 30])
def test_work_does_not_grow_with_the_number_of_parameters(build: type, groups: int) -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(60)]
    size = len(params) // groups
    split = [{"params": params[i : i + size]} for i in range(0, len(params), size)]
    optimizer = StepInBackward(build, split, lr=1e-2)
    for group in optimizer.param_groups:
        group["params"] = VisitCounter(group["params"])
    for _ in range(2):
        VisitCounter.visits = 0
        torch.cat([p * p for p in params]).sum().backward()
        assert VisitCounter.visits <= 12 * len(params)  # a few times for the whole pass, not for each gradient
        optimizer.step()
    assert all((p != 1).all() for p in params)
    assert [len(group["params"]) for group in optimizer.param_groups] == [size] * groups


def test_a_parameter_that_changes_its_group_has_the_new_groups_options() -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    groups = [{"params": [first]}, {"params": [second], "lr": 1.0}]
    optimizer = StepInBackward(torch.optim.SGD, groups, lr=0.0)
    for moved in (False, True):
        if moved:
            optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
        (first + second).sum().backward()
        optimizer.step()
    assert first.tolist() == [0.0] * 3
    assert second.tolist() == [-1.0] * 3


def test_an_error_in_a_step_leaves_the_groups_as_they_were() -> None:
    params = [nn.Parameter(torch.ones(300)) for _ in range(3)]
    optimizer = StepInBackward(optim.AdamW8bit, params, lr=1e-2)
    sum((p * p).sum() for p in params).backward()
    optimizer.step()
    optimizer.state[params[1]]["exp_avg"] = torch.zeros(7)
    with pytest.raises((RuntimeError, ValueError)):
        sum((p * p).sum() for p in params).backward()
    assert [p is q for p, q in zip(optimizer.param_groups[0]["params"], params, strict=True)] == [True] * 3
    assert len(optimizer.param_groups) == 1


# ---- what is refused


def backward_of(p: Tensor) -> None:
    p.square().sum().backward()


def test_a_second_gradient_before_step_is_refused() -> None:
    p = nn.Parameter(torch.ones(5))
    optimizer = StepInBackward(optim.AdamW, [p])
    backward_of(p)
    stepped = p.detach().clone()
    with pytest.raises(RuntimeError, match=r"second gradient of a parameter of shape \(5,\) before step"):
        backward_of(p)
    assert_same(p, nn.Parameter(stepped))
    optimizer.step()
    backward_of(p)


def test_zero_grad_cannot_discard_a_step() -> None:
    p = nn.Parameter(torch.ones(5))
    optimizer = StepInBackward(optim.AdamW, [p])
    optimizer.zero_grad()
    backward_of(p)
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) between backward\(\) and step\(\)"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def test_a_shared_layer_in_reentrant_checkpoints_is_refused() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    optimizer = StepInBackward(optim.AdamW, layer.parameters())
    y = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match="reentrant checkpoints that share a parameter"):
        y.sum().backward()
    optimizer.step()
    y = checkpoint(layer, checkpoint(layer, x, use_reentrant=False), use_reentrant=False)
    y.sum().backward()


@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_is_refused(unscale: bool) -> None:
    p = nn.Parameter(torch.ones(5))
    optimizer, scaler = StepInBackward(optim.AdamW, [p]), torch.amp.GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="a GradScaler cannot be used with this StepInBackward"):
        scaler.step(optimizer)
    optimizer.step()  # without the scaler
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    disabled.scale(p.sum()).backward()
    disabled.step(optimizer)


@over_kinds
def test_max_grad_norm_is_refused(build: type) -> None:
    p = nn.Parameter(torch.ones(5))
    with pytest.raises(ValueError, match=r"max_grad_norm must be None, got 1.0: the norm of all gradients"):
        StepInBackward(build, [p], max_grad_norm=1.0)
    optimizer = StepInBackward(build, [p])
    with pytest.raises(ValueError, match="max_grad_norm belongs to the whole optimizer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "max_grad_norm": 1.0})


def test_classes_that_are_refused() -> None:
    params = [nn.Parameter(torch.ones(5))]
    with pytest.raises(TypeError, match="optimizer_class must be a class of optimizers, got 'AdamW'"):
        StepInBackward("AdamW", params)
    with pytest.raises(TypeError, match=r"needs no closure, got LBFGS"):
        StepInBackward(torch.optim.LBFGS, params)
    with pytest.raises(TypeError, match=r"a plain one, got StepInBackward\(AdamW\)"):
        StepInBackward(type(StepInBackward(optim.AdamW, params)), params)


def test_several_devices_are_refused() -> None:
    on_cpu, on_meta = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5, device="meta"))
    with pytest.raises(ValueError, match="params must be on one device, got cpu, meta"):
        StepInBackward(optim.AdamW, [on_cpu, on_meta])
    optimizer = StepInBackward(optim.AdamW, [on_cpu])
    with pytest.raises(ValueError, match="params must be on one device"):
        optimizer.add_param_group({"params": [on_meta]})
    assert len(optimizer.param_groups) == 1


def test_gradients_that_processes_reduce_later_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    p = nn.Parameter(torch.ones(5))
    optimizer = StepInBackward(optim.AdamW, [p])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="before the 2 processes of this job can reduce it"):
        backward_of(p)
    assert torch.equal(p, torch.ones(5))
    assert not optimizer.state
