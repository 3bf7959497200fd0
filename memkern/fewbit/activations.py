"""Each activation as an object: its forward function, its parameters, and the levels of its derivative."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..compiling import assume_constant_result
from ..reference.activation import function_of
from .levels import Levels, TwoBranch, hardtanh_levels, relu_levels, softplus_levels
from .tables import LEVELS, TWO_BRANCHES


class Activation(NamedTuple):
    """An elementwise function, and what stands for its derivative in the backward pass.

    name: one of ``ACTIVATIONS``; "" for a user's function, which has no kernel.
    levels: of the derivative; with a ``two_branch`` they say on which side of the minimum x is.
    a, b: the parameters as kernels take them: softplus' beta and threshold, leaky ReLU's slope, hardtanh's bounds.
    two_branch: the derivative from the output, which is then saved too.
    function: a user's. Those with a name are looked up, as TorchDynamo takes no functions in constants.
    """

    name: str
    levels: Levels
    a: float = 0.0
    b: float = 0.0
    two_branch: TwoBranch | None = None
    function: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """torch's own function, or the user's. options: ``inplace=True``, where torch has it."""
        return (self.function or function_of(self.name, self.a, self.b))(x, **options)


def _levels(name: str, bits: int, a: float, b: float) -> Levels:
    if name in ("relu", "leaky_relu"):
        return relu_levels(a)
    if name == "hardtanh":
        return hardtanh_levels(a, b)
    table = LEVELS[name, bits]
    return softplus_levels(table, a, b) if name == "softplus" else table


@functools.lru_cache(maxsize=256)
def _activation(name: str, bits: int, keep: str, a: float = 0.0, b: float = 0.0, *signs: float) -> Activation:
    if keep == "codes":
        return Activation(name, _levels(name, bits, a, b), a, b)
    two_branch = TWO_BRANCHES[name]
    return Activation(name, Levels(1, (), (two_branch.at,), (1,)), two_branch=two_branch)


@assume_constant_result  # with dynamic=True, TorchDynamo would make variables of its numbers
def activation_of(
    name: str, bits: int, keep: str = "codes", parameters: tuple[float, float] | None = None
) -> Activation:
    """The activation of a name that saves codes of so many bits, or its output with ``keep="output"``."""
    if parameters is None:
        return _activation(name, bits, keep)
    return _activation(
        name, bits, keep, *parameters, *(math.copysign(1, p) for p in parameters)
    )  # -0.0 == 0.0
