"""One call of an optimizer's op in a step: its arguments, and the parameters that it steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..schemas import StepArgs, StepOp
from .dtensor.shards import Ranks


class Call(NamedTuple):
    """A call of an op. In a plan ``args`` lack what each step adds: gradients, learning rates, hyperparameters."""

    op: StepOp
    args: StepArgs  # whose tensors are DTensors where the parameters are
    places: list[int]  # the indices of the call's parameters among those of the step
    takes_all: bool  # whether the call steps all parameters of the step, in order
    ranks: Sequence[Ranks | None]  # for each parameter, the ranks that hold other elements of it
    by_reference: bool  # whether the plain PyTorch reference runs in place of a kernel
    cut: bool  # whether other ranks have elements of its blocks or layers
    product_devices: Sequence[torch.device | None]  # for each of Muon's matrices, where its products run; None: its own
    # With states on the host, their StagedStates (offload/device.py): in a plan a list of them, in a step one
    staged: Any  # None without
