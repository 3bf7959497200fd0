"""torch's generic tests of optimizers (tests/support/generic_tests.py) on StepInBackward and HostOffload.

The tests written in test_generic.py are left out: they need parameters on several devices, which these classes
refuse, or gradients that a step only reads, which these classes free or copy.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memkern import optim
from memkern.optim import HostOffload, StepInBackward
from tests.support.generic_optimizers import CASES
from tests.support.generic_tests import *  # noqa: F403
from tests.support.late_transfers import LateHostOffload

# HostOffload keeps rounding errors of bf16 parameters, which a checkpoint of fp32 parameters does not have.
pytestmark = pytest.mark.filterwarnings("ignore:the state_dict is of an optimizer with other options")
# name: class, options of the class itself
CLASSES: dict[str, tuple[type, dict[str, Any]]] = {
    "StepInBackward": (StepInBackward, {}),
    "HostOffload": (LateHostOffload, {}),
    "HostOffload on the CPU": (HostOffload, {}),
    "HostOffload, gradients too": (LateHostOffload, {"offload_gradients": True}),
    "HostOffload, by the device": (LateHostOffload, {"step_on": "device"}),
    "HostOffload, in backward": (LateHostOffload, {"step_on": "device", "step_in_backward": True}),
}
IN_BACKWARD = ("StepInBackward", "HostOffload, in backward")


def builder(name: str, build: type) -> Callable[..., torch.optim.Optimizer]:
    """Makes optimizers of class ``build`` in the wrapper of this name."""
    wrapper, wrapper_options = CLASSES[name]

    def make(params: Any, **options: Any) -> torch.optim.Optimizer:
        return wrapper(build, params, **wrapper_options, **options)

    make.__name__ = f"StepInBackward({build.__name__})" if wrapper is StepInBackward else "HostOffload"
    return make


def with_options(build: Callable[..., torch.optim.Optimizer], defaults: dict[str, Any]) -> Any:
    """Makes optimizers with copies of these options, some of which ``changes`` replace."""

    def make(params: Any, **changes: Any) -> torch.optim.Optimizer:
        return build(params, **copy.deepcopy({**defaults, **changes}))

    make.build = build
    return make


# Wrappers that run in `make test-all` alone.
FULL = ("HostOffload on the CPU", "HostOffload, gradients too", "HostOffload, by the device")
# The cases of generic_optimizers.py that run on wrappers.
WRAPPED_CASES = {
    optim.AdamW: ("maximize", "tensor lr", "capturable", "max_grad_norm", "amsgrad"),
    optim.AdamW8bit: ("default", "8 bits", "dynamic"),
}


def param_of(name: str, build: type, *values: Any) -> Any:
    marks = [pytest.mark.full] if name in FULL else []
    return pytest.param((name, build, *values), marks=marks, id="-".join([name, build.__name__, *values[:1]]))


PARAMS = [
    param_of(name, build, case, options)
    for name in CLASSES
    for build, case, options in CASES
    if case in WRAPPED_CASES.get(build, ())
    and not (case == "max_grad_norm" and name in IN_BACKWARD)
    and not (case == "capturable" and "step_on" in CLASSES[name][1])
]


@pytest.fixture(params=PARAMS)
def new(request: pytest.FixtureRequest) -> Any:
    name, build, _, options = request.param
    make = with_options(builder(name, build), options)
    make.options = options
    return make


@pytest.fixture(params=[param_of(name, build) for name in CLASSES for build in (optim.AdamW8bit, optim.LAMB)])
def plain(request: pytest.FixtureRequest) -> Any:
    name, build = request.param
    make = with_options(builder(name, build), {"min_8bit_size": 0})
    make.options = {}
    return make
