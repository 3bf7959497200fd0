"""Fixtures for tests of all optimizers: ``new`` builds classes with options of each case, ``plain`` each class."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memkern import optim
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
