"""memkern.compile with dropout, checkpoints, autocast, retain_graph: torch's own bits, or 8 bits' errors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.support.partitioned import backend, gradients_of, relative_error

ROWS, WIDTH = 64, 64
aten = torch.ops.aten


class Block(nn.Module):
    """A norm and an MLP with dropout, on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Model(nn.Module):
    """Two blocks, each called by ``around(block, x)``; returns a loss."""

    def __init__(self, around: Callable[[Block, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.around = around or (lambda block, x: block(x))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.around(block, x)
        return x.square().mean()


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = (aten.addmm.default, aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(block: Block, x: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": Model,
    "checkpoints": lambda: Model(lambda block, x: checkpoint(block, x, use_reentrant=False)),
    "selective checkpoints": lambda: Model(_selective),
}
Backward = Callable[[Callable[[], Tensor]], None]  # runs the backward pass of a function that returns a loss


def _once(loss: Callable[[], Tensor]) -> None:
    loss().backward()


def _twice(loss: Callable[[], Tensor]) -> None:
    first = loss()
    second = loss()
    (2 * second).backward()
    first.backward()


def _retained(loss: Callable[[], Tensor]) -> None:
    with torch._functorch.config.patch(donated_buffer=False):
        value = loss()
        value.backward(retain_graph=True)
        value.backward()


def _autocast(loss: Callable[[], Tensor]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        value = loss()
    value.backward()


def _compiled_autograd(loss: Callable[[], Tensor]) -> None:
    with torch._dynamo.config.patch(compiled_autograd=True):
        loss().backward()


STEPS: dict[str, Backward] = {
    "once": _once,
    "two forward passes first": _twice,
    "retain_graph": _retained,
    "autocast": _autocast,
    "compiled autograd": _compiled_autograd,
}


def gradients(make: Callable[[], nn.Module], step: Backward, bits: Any) -> Tensor:
    torch._dynamo.reset()
    model = make()
    call = torch.compile(model, backend=backend(bits))
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)  # for dropout
    step(lambda: call(x))
    return gradients_of(model)


CASES = [("dropout", steps) for steps in STEPS] + [(name, "once") for name in MODELS if name != "dropout"]
QUICK = {("dropout", "once"), ("selective checkpoints", "once")}


@pytest.mark.parametrize(
    ("name", "steps"), [pytest.param(*case, marks=() if case in QUICK else pytest.mark.full) for case in CASES]
)
@pytest.mark.filterwarnings("ignore")
def test_exact_has_torchs_bits_and_8_bits_are_near(name: str, steps: str) -> None:
    expected, exact, coded = (gradients(MODELS[name], STEPS[steps], bits) for bits in (None, "exact", 8))
    assert torch.equal(exact, expected)
    assert relative_error(coded, expected) < 0.03


@pytest.mark.parametrize("bits", ["exact", 8])
def test_evaluation_gives_the_models_own_result(bits: Any) -> None:
    torch._dynamo.reset()
    model = Model().eval()
    x = torch.randn(ROWS, WIDTH)
    call = torch.compile(model, backend=backend(bits))
    for context in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        with context():
            torch.testing.assert_close(call(x), model(x))
