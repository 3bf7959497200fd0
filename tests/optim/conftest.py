"""Fixtures for tests of all optimizers: ``new`` builds classes with options of each case, ``plain`` each class."""

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from memkern import optim
from memkern.optim.base import BlockwiseOptimizer
from tests.support.generic_optimizers import SOME_CASES
from tests.support.helpers import EIGHT_BIT, name_of


@pytest.fixture(params=SOME_CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def new(request: pytest.FixtureRequest) -> Callable[..., torch.optim.Optimizer]:
    """Builds a case's optimizer from copies of its options; ``changes`` replace some of them."""
    build, _, options = request.param

    def make(params: Any, **changes: Any) -> torch.optim.Optimizer:
        return build(params, **copy.deepcopy({**options, **changes}))

    make.build, make.options = build, options
    return make


@pytest.fixture(params=[*EIGHT_BIT, optim.AdamW], ids=name_of)
def plain(request: pytest.FixtureRequest) -> Callable[..., torch.optim.Optimizer]:
    """Builds an optimizer of each class with 8-bit states, which it uses for every tensor, and AdamW."""

    def make(params: Any, **options: Any) -> torch.optim.Optimizer:
        return request.param(params, **{"min_8bit_size": 0, **options})

    make.build, make.options = request.param, {}
    return make


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Methods of BlockwiseOptimizer that make tensors: in a step, and where states are saved or loaded.
STEP_METHODS = ("_init_group", "_plan", "_follow_groups", "_convert_storage")
STATE_METHODS = ("state_dict", "load_state_dict", "__setstate__")


@pytest.fixture(autouse=True)
def _other_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """With MEMKERN_TEST_DEFAULT=meta or float64, set by hand, these methods run under that default device or dtype.

    Tests then fail where the methods make a tensor without naming its device or dtype.
    """
    default = os.environ.get("MEMKERN_TEST_DEFAULT")
    if not default:
        return
    mode = {"meta": lambda: torch.device("meta"), "float64": lambda: default_dtype(torch.float64)}[default]

    def under(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with mode():
                return function(*args, **kwargs)

        return call

    for name in (*STEP_METHODS, *STATE_METHODS):
        monkeypatch.setattr(BlockwiseOptimizer, name, under(getattr(BlockwiseOptimizer, name)))
