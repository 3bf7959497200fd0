"""KeyboardInterrupt in a forward pass: torch calls no hooks after it, and what follows must be saved as if it had."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import memkern
from memkern import memory
from memkern.saved import session

from .helpers import WIDTH, Model, gradients, ids, same


@pytest.fixture(autouse=True)
def no_hooks_stay_open() -> Iterator[None]:
    """Of a test that fails."""
    yield
    while session.top_hooks() is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()


class _Interrupted(nn.Module):
    def __init__(self, exception: type[BaseException] | None) -> None:
        super().__init__()
        self.layer, self.exception = nn.Linear(WIDTH, WIDTH), exception

    def forward(self, x: Tensor) -> Tensor:
        if self.exception is not None:
            raise self.exception
        return self.layer(x).relu()


def interrupt(model: nn.Module, x: Tensor) -> BaseException:
    """Returned, with its traceback: notebooks hold the last one."""
    try:
        model(x)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


EXCEPTIONS = pytest.mark.parametrize(
    "exception",
    [
        KeyboardInterrupt,
        ValueError,
        *(pytest.param(e, marks=pytest.mark.full) for e in (SystemExit, GeneratorExit)),
    ],
)


@EXCEPTIONS
@pytest.mark.parametrize("restored", [False, True])
def test_other_models_are_saved_as_torch_does(exception: type[BaseException], restored: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), _Interrupted(exception))
    other, x = Model(), torch.randn(256, WIDTH)
    expected, plain = (
        gradients(other, lambda: other(ids())),
        memory.saved_bytes(lambda: other(ids()), other),
    )
    memkern.compress(model, saved_bits={"": 8, "1": "exact"})
    error = interrupt(model, x)
    if restored:
        memkern.restore(model)
    assert same(gradients(other, lambda: other(ids())), expected)
    assert memory.saved_bytes(lambda: other(ids()), other) == plain
    assert session.top_hooks() is None
    del error


@EXCEPTIONS
def test_the_model_itself_goes_on(exception: type[BaseException]) -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), _Interrupted(exception)), torch.randn(256, WIDTH)
    memkern.compress(model, saved_bits="exact")
    error = interrupt(model, x)
    model[1].exception = None
    for _ in range(2):
        model(x).sum().backward()
        assert session.top_hooks() is None
    del error


def _our_block() -> contextlib.AbstractContextManager:
    return memkern.quantize_saved("exact")


def _torch_s_block() -> contextlib.AbstractContextManager:
    return saved_tensors_hooks(lambda t: t, lambda t: t)


@EXCEPTIONS
@pytest.mark.parametrize("block", [_our_block, _torch_s_block])
def test_blocks_around_it_end(
    block: Callable[[], contextlib.AbstractContextManager], exception: type[BaseException]
) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(_Interrupted(exception)))
    x = torch.randn(256, WIDTH)
    memkern.compress(model, saved_bits={"": 8, "1": "exact", "1.0": None})
    with block():
        error = interrupt(model, x)
    memkern.restore(model)
    assert session.top_hooks() is None
    del error


@EXCEPTIONS
def test_a_block_around_it_that_goes_on(exception: type[BaseException]) -> None:
    """Operations that follow inside of the block are saved as the block says."""
    model, other = nn.Sequential(_Interrupted(exception)), Model()
    memkern.compress(model, saved_bits="exact")
    x = torch.randn(256, WIDTH)

    def forward(before: Callable[[], object]) -> Any:
        with memkern.quantize_saved(8):
            before()
            return other(ids())

    plain = memory.live_bytes_after(lambda: forward(lambda: None), model, other, x)
    assert memory.live_bytes_after(lambda: forward(lambda: interrupt(model, x)), model, other, x) == plain
    assert session.top_hooks() is None
