"""A call of an op, of which a step's plan consists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..schemas import StepArgs, StepOp
from .dtensor.shards import Ranks


class Call(NamedTuple):
    """A call of an op, as a plan has it, or with the values of a step."""

    op: StepOp
    args: StepArgs  # with DTensors where the parameters are
    places: list[int]  # of the parameters in the step
    takes_all: bool  # these are all, in order
    ranks: Sequence[Ranks | None]  # that hold other elements of each parameter
    by_reference: bool
    cut: bool  # other ranks have elements of its blocks or layers
    product_devices: Sequence[torch.device | None]  # of Muon's matrix products; None for the matrix's own
    # Where the states come from the host, what comes at a time (memkern.optim.offload.device.Staged): all of a plan's
    # call, one of a call with the values of a step; else None.
    staged: Any
