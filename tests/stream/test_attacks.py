"""Unusual uses of a model with weights on the host: the bits of the same use on the device, or an error."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memkern
from memkern.optim.arrivals import Arrivals, Worker
from memkern.techniques.options import Techniques
from tests.stream import runs
from tests.stream.runs import (
    PLAIN,
    STREAMED,
    Model,
    assert_equal,
    batches,
    full_copy,
    model_for,
    optimizer_for,
    train,
    weights,
)


class Interrupted(Exception):
    """Ends a pass or a step in its middle."""


Use = Callable[[Model, torch.optim.Optimizer, Techniques], Any]


def on_device_and_streamed(use: Use, techniques: Techniques = PLAIN) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights after ``use`` of a model with weights on the device, and of one with weights on the host.

    Asserts that ``use`` returns the same losses for both.
    """
    results, losses = [], []
    for t in (techniques, techniques.replace(weights_on_host="layers")):
        model = model_for(t)
        losses.append(use(model, optimizer_for(model, t), t))
        results.append(weights(model))
    assert losses[0] == losses[1]
    return results[0], results[1]


def interrupt(*_: Any) -> None:
    """A hook that ends a pass."""
    raise Interrupted


# ---- uses that have the bits of the same use on the device


def forward_between_backward_and_step(model: Model, optimizer: torch.optim.Optimizer, t: Techniques) -> list[float]:
    losses = []
    for step in range(3):
        (tokens,) = batches(step, t)
        model(tokens).backward()
        with torch.no_grad():
            losses.append(model.eval()(tokens).item())
        model.train()(tokens)  # makes a graph without a backward pass
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode(False), torch.no_grad():
            losses.append(model(tokens).item())
    return losses


def step_after_an_interrupted_forward_pass(
    model: Model, optimizer: torch.optim.Optimizer, t: Techniques
) -> list[float]:
    """Weights that the interrupted pass has left on the device are not used after the step."""
    losses = []
    for step, layer in enumerate(("blocks.1.up", "head", "norm")):
        (tokens,) = batches(step, t)
        model(tokens).backward()
        handle = model.get_submodule(layer).register_forward_hook(interrupt)
        with pytest.raises(Interrupted):
            model(tokens)
        handle.remove()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(model(tokens).item())
    model.state_dict()
    return losses


def edited_weights(model: Model, optimizer: torch.optim.Optimizer, t: Techniques) -> None:
    train(model, optimizer, t, range(2))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    train(model, optimizer, t, range(2, 4))
    state = {name: x.clone() for name, x in model.state_dict().items()}
    train(model, optimizer, t, range(4, 5))
    model.load_state_dict(state)
    train(model, optimizer, t, range(5, 6))


def two_graphs_at_a_time(model: Model, optimizer: torch.optim.Optimizer, t: Techniques) -> None:
    for step in range(3):
        losses = [model(tokens) for tokens in batches(step, t.replace(accumulation=2))]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def two_optimizers_and_one_that_was_dropped(model: Model, optimizer: torch.optim.Optimizer, t: Techniques) -> None:
    train(model, optimizer, t, range(1))
    del optimizer
    inside = [*model.blocks.parameters()]
    outside = [*model.embedding.parameters(), *model.norm.parameters(), *model.head.parameters()]
    optimizers = [memkern.make_optimizer(params, t, lr=1e-2) for params in (inside, outside)]
    for step in range(3):
        model(batches(step, t)[0]).backward()
        for part in optimizers:
            part.step()
            part.zero_grad()


def frozen_weights_and_blocks(model: Model, optimizer: torch.optim.Optimizer, t: Techniques) -> None:
    model.embedding.weight.requires_grad_(False)
    for p in [*model.blocks[0].parameters(), model.blocks[2].up.weight]:
        p.requires_grad_(False)
    train(model, optimizer, t, range(3))


def host_offload(options: dict[str, Any]) -> Use:
    """Training with HostOffload, which a model with weights on the host does not need, and which changes no bit."""

    def use(model: Model, optimizer: torch.optim.Optimizer, t: Techniques) -> None:
        inner = memkern.optim.AdamW8bit
        offload = memkern.optim.HostOffload(inner, model.parameters(), lr=1e-2, host_dtype=None, **options)
        train(model, offload, t, range(3))

    return use


USES: dict[str, tuple[Use, Techniques]] = {
    "forward between": (forward_between_backward_and_step, PLAIN),
    "interrupted forward": (step_after_an_interrupted_forward_pass, PLAIN),
    "edited weights": (edited_weights, PLAIN),
    "two graphs": (two_graphs_at_a_time, PLAIN),
    "two optimizers": (two_optimizers_and_one_that_was_dropped, PLAIN.replace(step_in_backward=True)),
    "frozen": (frozen_weights_and_blocks, PLAIN),
    "HostOffload": (host_offload({"offload_gradients": True}), Techniques(state_bits=8)),
    "HostOffload on the device": (host_offload({"step_on": "device"}), Techniques(state_bits=8)),
}


@pytest.mark.parametrize("name", USES)
def test_a_use_has_the_bits_of_the_device(name: str) -> None:
    assert_equal(*on_device_and_streamed(*USES[name]))


# ---- passes that are interrupted


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("changes", [{}, {"step_in_backward": True}, {"accumulation": 2}], ids=str)
def test_a_pass_that_was_interrupted_is_forgotten(phase: str, changes: dict[str, Any]) -> None:
    """An exception ends the last block's forward or backward pass; then training goes on as if it had not begun.

    With steps in backward it does not go on: parameters whose gradients came before the exception have been stepped.
    """
    techniques = PLAIN.replace(**changes)

    def use(model: Model, optimizer: torch.optim.Optimizer, t: Techniques) -> None:
        train(model, optimizer, t, range(2))
        layer = model.blocks[3].down if phase == "forward" else model.blocks[3].up
        if t.weights_on_host:
            register = layer.register_forward_hook if phase == "forward" else layer.register_full_backward_hook
            handle = register(interrupt)
            for tokens in batches(9, t)[-1:]:
                with pytest.raises(Interrupted):
                    model(tokens).backward()
            handle.remove()
            if phase == "backward" and not hasattr(model, "reset_iter_state"):
                with pytest.raises(RuntimeError, match=r"was interrupted, .* torch 2\.13 or newer"):
                    model(batches(0, t)[0])
                pytest.skip("this torch's fully_shard cannot forget a backward pass")
            if "step_in_backward" not in changes:
                optimizer.zero_grad()
            else:
                stepped = [*optimizer._stepped]  # type: ignore[attr-defined]
                assert len(stepped) <= 1  # the head, whose backward pass comes before the last block's
                return
        elif "step_in_backward" in changes:
            return
        train(model, optimizer, t, range(2, 4))

    plain, streamed = on_device_and_streamed(use, techniques)
    if "step_in_backward" in changes:
        different = [name for name, x in plain.items() if not torch.equal(x, streamed[name])]
        assert different in ([], ["head.weight"])
    else:
        assert_equal(plain, streamed)


@pytest.mark.parametrize("zeroed_by", [None, "optimizer", "model"])
def test_gradients_of_a_pass_before_one_that_was_interrupted(zeroed_by: str | None) -> None:
    """They stay, unless zero_grad() is called. Each gradient of the interrupted pass may or may not stay."""
    techniques = Techniques(precision="fp32", state_bits=32, accumulation=3)
    passes = batches(0, techniques)
    plain, gradients = model_for(techniques), list[dict[str, torch.Tensor]]()
    for tokens in passes:
        plain(tokens).backward()
        gradients.append({name: full_copy(p.grad) for name, p in plain.named_parameters()})
        plain.zero_grad()

    model = model_for(techniques.replace(weights_on_host="layers"))
    if not hasattr(model, "reset_iter_state"):
        pytest.skip("this torch's fully_shard cannot forget a backward pass")
    optimizer = optimizer_for(model, techniques)
    model(passes[0]).backward()
    handle = model.blocks[2].up.register_full_backward_hook(interrupt)
    with pytest.raises(Interrupted):
        model(passes[1]).backward()
    handle.remove()
    if zeroed_by is not None:
        {"model": model, "optimizer": optimizer}[zeroed_by].zero_grad()
    model(passes[2]).backward()
    for name, p in model.named_parameters():
        first, second, third = (g[name] for g in gradients)
        allowed = [third] if zeroed_by else [first + third, first + second + third]
        assert any(torch.allclose(full_copy(p.grad), x, rtol=1e-4, atol=1e-6) for x in allowed), name


@pytest.mark.parametrize("step_in_backward", [False, True])
def test_a_model_that_is_dropped_is_freed(step_in_backward: bool) -> None:
    def weak_references() -> list[Any]:
        techniques = STREAMED.replace(step_in_backward=step_in_backward)
        model = model_for(techniques)
        train(model, optimizer_for(model, techniques), techniques, range(2))
        return [*map(weakref.ref, model.parameters())]

    references = weak_references()
    gc.collect()
    assert references
    assert all(p() is None for p in references)


class Twice(Model):
    """Runs its second block twice, and hands blocks their input by name."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in (*self.blocks, self.blocks[1]):
            x = block(x=x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_block_that_runs_twice_sums_two_gradients(monkeypatch: pytest.MonkeyPatch, accumulation: int) -> None:
    """On the host, gradients are added in another order. The sum of two has the same bits; the sum of four, from two
    micro-batches, may differ by rounding."""
    monkeypatch.setattr(runs, "Model", Twice)

    def use(model: Model, optimizer: torch.optim.Optimizer, t: Techniques) -> None:
        losses.append(train(model, optimizer, t, range(3)))

    losses: list[list[float]] = []
    techniques = Techniques(precision="fp32", state_bits=32, optimizer="sgd", accumulation=accumulation)
    plain, streamed = on_device_and_streamed(use, techniques)
    if accumulation == 1:
        assert_equal(plain, streamed)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


class Checkpointed(Model):
    """Calls its blocks in checkpoints, as transformers' gradient_checkpointing_enable() does."""

    reentrant = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("changes", [{}, {"step_in_backward": True}, {"accumulation": 2}], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_calls_of_blocks_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, reentrant: bool, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(runs, "Model", Checkpointed)
    monkeypatch.setattr(Checkpointed, "reentrant", reentrant)

    def use(model: Model, optimizer: torch.optim.Optimizer, t: Techniques) -> list[float]:
        return train(model, optimizer, t, range(3))

    assert_equal(*on_device_and_streamed(use, PLAIN.replace(**changes)))


def test_a_layer_called_outside_of_the_forward_pass_raises() -> None:
    model = model_for(STREAMED)
    (tokens,) = batches(0, STREAMED)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a FSDPEmbedding was called outside of the forward pass of the Model"):
            model.embedding(tokens)
        model(tokens).backward()


def test_a_second_backward_before_the_step_raises() -> None:
    techniques = STREAMED.replace(step_in_backward=True)
    model = model_for(techniques)
    optimizer = optimizer_for(model, techniques)
    (tokens,) = batches(0, techniques)
    model(tokens).backward()
    with pytest.raises(RuntimeError, match="zero_grad\\(\\) between backward\\(\\) and step\\(\\)"):
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="a second gradient of a parameter"):
        model(tokens).backward()


def test_an_error_of_the_step_comes_out_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    techniques = STREAMED.replace(step_in_backward=True)
    model = model_for(techniques)
    optimizer: Any = optimizer_for(model, techniques)

    def fails(params: Any) -> None:
        raise Interrupted

    monkeypatch.setattr(optimizer, "_step_some", fails)
    with pytest.raises(Interrupted):
        model(batches(0, techniques)[0]).backward()


@pytest.mark.parametrize(
    "changes", [{"step_in_backward": True}, pytest.param({"accumulation": 2}, marks=pytest.mark.full)], ids=str
)
def test_a_slow_host_does_not_let_gradients_pile_up(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    """Gradients of at most four of ten blocks wait for the thread that steps, or for the sum of micro-batches."""
    techniques = STREAMED.replace(**changes)
    model = model_for(techniques, blocks=10)
    optimizer: Any = optimizer_for(model, techniques)
    names = {p: name.rsplit(".", 2)[0] for name, p in model.named_parameters()}
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    waiting: list[int] = []
    take, step = Arrivals._take_gradient, Worker.step

    def noted(p: torch.Tensor) -> torch.Tensor:
        gradient = take(p)
        if names[p].startswith("blocks"):
            alive.add(gradient)
        return gradient

    def slow(worker: Worker, function: Any, bucket: Any) -> None:
        def run(bucket: Any) -> None:
            time.sleep(0.02)
            function(bucket)

        step(worker, run, bucket)
        waiting.append(len(alive))

    monkeypatch.setattr(Arrivals, "_take_gradient", staticmethod(noted))
    monkeypatch.setattr(Worker, "step", slow)
    train(model, optimizer, techniques, range(2))
    block_size = len([*model.blocks[0].parameters()])
    assert len(waiting) > 10
    assert block_size <= max(waiting) <= 4 * block_size
    if "step_in_backward" in changes:
        assert all(p.grad is None for p in model.parameters())
