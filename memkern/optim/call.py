"""One call of an optimizer's op, as a part of a step: its arguments, and the parameters that it steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..schemas import StepArgs, StepOp
from .dtensor.shards import Ranks


class Call(NamedTuple):
    """A call of an op: in a plan without gradients, learning rates and the like, in a step with them."""

    op: StepOp
    args: StepArgs  # with DTensors where the parameters are
    places: list[int]  # of the parameters in the step
    takes_all: bool  # whether the call steps all parameters of the step, in order
    ranks: Sequence[Ranks | None]  # that hold other elements of each parameter
    by_reference: bool
    cut: bool  # other ranks have elements of its blocks or layers
    product_devices: Sequence[torch.device | None]  # of Muon's matrix products; None for the matrix's own
    # Where states come from the host: in a plan a list of memkern.optim.offload.device.Staged, in a step one of them.
    # Else None.
    staged: Any
