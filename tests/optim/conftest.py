"""Fixtures that build every optimizer in turn."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.generic_optimizers import CASES
from tests.support.helpers import OPTIMIZERS, name_of


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def new(request: pytest.FixtureRequest) -> Callable[..., torch.optim.Optimizer]:
    """Builds the optimizer, with options in place of the case's; tensors among them are its own."""
    build, _, options = request.param

    def make(params: Any, **changes: Any) -> torch.optim.Optimizer:
        return build(params, **copy.deepcopy({**options, **changes}))

    make.build, make.options = build, options
    return make


@pytest.fixture(params=OPTIMIZERS, ids=name_of)
def plain(request: pytest.FixtureRequest) -> Callable[..., torch.optim.Optimizer]:
    """Builds an optimizer of each class, of which those with 8 bits use them for every tensor."""

    def make(params: Any, **options: Any) -> torch.optim.Optimizer:
        return request.param(params, **{"min_8bit_size": 0, **options})

    make.build, make.options = request.param, {}
    return make
