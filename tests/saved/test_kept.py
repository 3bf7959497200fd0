"""memkern.quantize_saved keeps nothing: after each step as many bytes as with torch, without the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import memkern
from memkern import memory
from memkern.memory import LiveBytes
from memkern.saved import evaluation, store
from memkern.saved.packed import Packed

from .helpers import WIDTH, Model, gradients, ids, same, warm_model

pytestmark = pytest.mark.usefixtures("no_collector")


def saved_with(bits: Any) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if bits is None else memkern.quantize_saved(bits)


def bytes_after_each(step: Callable[[], object], *held: memory.Held, steps: int = 4) -> list[int]:
    """Bytes alive after each of several steps; gradients are taken away."""
    live = LiveBytes([])
    found = []
    with live:
        for _ in range(steps):
            step()
            for item in held:
                if isinstance(item, nn.Module):
                    item.zero_grad()
            found.append(live.live)
    return found


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = WIDTH
        self.trunk = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.SiLU())
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return F.silu(self.first(h)).square().mean(), (F.silu(self.second(h)) * h).square().mean()


@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize("retain", [False, True])
def test_one_of_two_heads_goes_backward(bits: Any, retain: bool) -> None:
    """Half of the users of what was decoded never run."""
    model, x = _TwoHeads(), torch.randn(256, WIDTH)

    def step() -> None:
        with memkern.quantize_saved(bits):
            first, _second = model(x)
        torch.autograd.grad(first, list(model.first.parameters()), retain_graph=retain)

    assert bytes_after_each(step, model) == [0] * 4


@pytest.mark.parametrize("bits", ["exact", 8])
def test_a_block_around_all_steps_holds_nothing_of_a_step(bits: Any) -> None:
    model, x = _TwoHeads(), torch.randn(256, WIDTH)

    def step() -> None:
        torch.autograd.grad(sum(model(x)), list(model.parameters()))  # type: ignore[arg-type]

    with memkern.quantize_saved(bits):
        assert bytes_after_each(step, model) == [0] * 4


@pytest.mark.parametrize("bits", ["exact", 8])
def test_a_graph_that_lives_on_holds_no_decoded_tensors(bits: Any) -> None:
    """The other head's graph is alive after the pass of the first one: it holds what it held before."""
    model, x = _TwoHeads(), torch.randn(256, WIDTH)
    live = LiveBytes([])
    with live:
        with memkern.quantize_saved(bits):
            first, _second = model(x)
        before = live.live
        torch.autograd.grad(first, list(model.first.parameters()), retain_graph=True)
        assert live.live <= before


@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax, lambda x, dim: torch.tanh(x)])
def test_a_result_that_nothing_uses_is_freed(function: Callable[..., Tensor], bits: Any) -> None:
    """Probabilities that are computed for a metric: their node saves its own result, and must not hold itself."""
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(256, WIDTH)

    def step() -> None:
        with memkern.quantize_saved(bits):
            h = layer(x)
            function(h, -1)
            loss = F.silu(h).square().mean()
        loss.backward()

    assert bytes_after_each(step, layer) == [0] * 4


class _Fails(torch.autograd.Function):
    """Raises in its backward pass, as running out of memory does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("out of memory")


def _raises(backward: Callable[[], object]) -> None:
    """As pytest.raises, which leaves a reference cycle through the traceback's frames."""
    message = ""
    try:
        backward()
    except RuntimeError as error:
        message = str(error)
    assert message == "out of memory"


@pytest.mark.parametrize("bits", ["exact", 8])
def test_an_exception_in_the_backward_pass_frees_what_was_decoded(bits: Any) -> None:
    x = torch.randn(256, WIDTH, requires_grad=True)
    layer = nn.Linear(WIDTH, WIDTH)
    live = LiveBytes([x, *layer.parameters()])
    with live:
        with memkern.quantize_saved(bits):
            h = F.silu(layer(x))
            fails = _Fails.apply(h * 1)
            loss = fails.sum() + (h.sigmoid() * h).sum() + (h * h).sum()  # run before what fails
            del h, fails
        before = live.live
        _raises(lambda: loss.backward(retain_graph=True))
        layer.zero_grad()
        x.grad = None
        assert live.live <= before
        assert len(evaluation._passes) == 0


@pytest.mark.usefixtures("python_hooks")
@pytest.mark.parametrize("bits", ["exact", 8])
def test_an_exception_while_decoding_frees_what_was_decoded(bits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its traceback, which holds the frames of the unpack hook, is still alive."""
    model = Model()
    call, passes = evaluation._Pass.__call__, []

    def fail_at_the_twentieth(self: Any, value: Any) -> Tensor:
        passes.append(self)
        if len(passes) == 20:
            assert self.cached
            raise RuntimeError("out of memory")
        return call(self, value)

    with memkern.quantize_saved(bits):
        loss = model(ids()).square().mean()
    with monkeypatch.context() as patch:
        patch.setattr(evaluation._Pass, "__call__", fail_at_the_twentieth)
        with pytest.raises(RuntimeError, match="out of memory"):
            loss.backward(retain_graph=True)
        assert not passes[-1].cached
    model.zero_grad()
    loss.backward()  # the retry


def test_four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own model and graph; all of them begin their backward passes at the same time."""
    errors: list[BaseException] = []
    engine = torch.autograd.Variable._execution_engine
    together = threading.Barrier(4)

    class Engine:
        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        def queue_callback(self, callback: Callable[[], None]) -> None:
            together.wait(10)
            engine.queue_callback(callback)

    def work(seed: int) -> None:
        try:
            x = torch.full((16, WIDTH), float(seed), requires_grad=True)
            for bits in ("exact", 8, "exact", 8):
                with memkern.quantize_saved(bits):
                    y = (F.silu(x * 1.0) * x).sum()
                gradient = torch.autograd.grad(y, x)[0]
                silu = F.silu(x.detach())
                expected = silu + x.detach() * torch.ops.aten.silu_backward(torch.ones_like(x), x.detach())
                torch.testing.assert_close(gradient, expected, rtol=0.02, atol=1e-6)
        except BaseException as error:
            errors.append(error)
            together.abort()

    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", Engine())
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# ---- hooks around ours


@pytest.mark.parametrize("bits", ["exact", 8])
def test_what_is_offloaded_is_freed(bits: Any) -> None:
    """Under hooks that copy everything away: as many bytes are left as with them alone."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Softplus())
    x = torch.randn(512, WIDTH)

    def forward(bits: Any) -> int:
        away: list[Tensor] = []  # allocated outside of what is counted

        def offload(t: Tensor) -> Tensor:
            away.append(t.clone())
            return away[-1]

        live = LiveBytes([x, *model.parameters()])
        before = live.live
        with live, saved_tensors_hooks(offload, lambda t: t), saved_with(bits):
            y = model(x).sum()
        total = live.live - before - memory.tensor_bytes(away)
        del y
        return total

    assert forward(bits) <= forward(None) + 64


@pytest.mark.parametrize("bits", ["exact", 8])
def test_saved_bytes_does_not_count_frozen_weights(bits: Any) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 256))
    for p in model[1].parameters():
        p.requires_grad_(False)
    x = torch.randn(8, 256)
    plain = memory.saved_bytes(lambda: model(x), x)
    memkern.compress(model, saved_bits=bits)
    assert memory.saved_bytes(lambda: model(x), x) <= plain


# ---- one block around a loop


def test_one_block_around_a_whole_loop_keeps_no_notes() -> None:
    model = Model()
    x = torch.randn(64, WIDTH, requires_grad=True)

    def step() -> None:
        (F.dropout(x * 1.0, 0.5).sum() + model(ids()).square().mean()).backward()

    with memkern.quantize_saved(8) as context:
        for _ in range(10):
            step()
        before = len(gc.get_objects())
        for _ in range(30):
            step()
        assert len(gc.get_objects()) - before < 30
        session = context._opened.sessions[0]
        assert len(session.store.notes) <= 100


@pytest.mark.usefixtures("python_hooks")
@pytest.mark.parametrize(("bits", "most"), [(8, 12.5), ("exact", 11)])
def test_few_objects_for_the_garbage_collector(bits: Any, most: int) -> None:
    """Of each saved tensor, until the backward pass: they decide how often Python looks through all its objects.

    Half an object is for the weights: what is derived from one holds its memory of the forward pass. One is metadata
    of nodes that save nothing: all are met, as numbers do not tell which nodes of other threads matter.
    """
    model, x, before = warm_model(bits)
    y = model(x)
    gc.collect()
    made = [o for o in gc.get_objects() if id(o) not in before]
    saved = sum(isinstance(o, Packed) for o in made)
    assert saved > 100
    assert len(made) <= most * saved
    del y


# ---- falling back


@pytest.mark.usefixtures("python_hooks")
def test_hooks_that_show_no_graph_cost_only_the_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torch handed the pack hook detached tensors."""
    from memkern.saved.session import Session

    pack = Session.pack
    monkeypatch.setattr(Session, "pack", lambda self, x: pack(self, x.detach()))
    model = Model()
    expected = gradients(model, lambda: model(ids()))
    with memkern.quantize_saved(8):
        assert same(gradients(model, lambda: model(ids())), expected)


@pytest.mark.usefixtures("python_hooks")
def test_unresolved_values_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "derive", lambda *args, **options: None)
    model = Model()
    expected = gradients(model, lambda: model(ids()))
    with memkern.quantize_saved("exact"):
        assert same(gradients(model, lambda: model(ids())), expected)
