"""Each activation as an object: its forward function, its parameters, and the levels of its derivative."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reference.activation import function_of
from ..tracing import assume_constant_result
from .levels import Levels, TwoBranch, elu_levels, hardtanh_levels, relu_levels, shrink_levels, softplus_levels
from .tables import LEVELS, TWO_BRANCHES


class Activation(NamedTuple):
    """An elementwise function, and what stands for its derivative in the backward pass.

    name: one of ``ACTIVATIONS``; "" for a user's function, which has no kernel.
    levels: of the derivative; with a ``two_branch`` they say on which side of the minimum x is.
    a, b: the parameters as kernels take them: softplus' beta and threshold, leaky ReLU's slope, hardtanh's bounds,
        ELU's and CELU's alpha, threshold's threshold and value, the shrinking functions' lambd and that in x's dtype.
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


SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805  # Klambauer et al. (arXiv 1706.02515)


def _levels(name: str, bits: int, a: float, b: float) -> Levels:
    """The levels of a function's derivative with these parameters, as :class:`Activation` names them."""
    match name:
        case "relu" | "leaky_relu":
            return relu_levels(a)
        case "threshold":
            return relu_levels(threshold=a)
        case "hardtanh":
            return hardtanh_levels(a, b)
        case "hardsigmoid":
            return hardtanh_levels(-3.0, 3.0, 1 / 6)
        case "hardshrink" | "softshrink":
            return shrink_levels(b)
        case "elu":
            return elu_levels(LEVELS["elu", bits], a)
        case "celu":
            return elu_levels(LEVELS["elu", bits], 1.0).scaled(1 / a)
        case "selu":
            return elu_levels(LEVELS["elu", bits], SELU_ALPHA, SELU_SCALE)
        case "logsigmoid":
            return LEVELS["softplus", bits].one_minus()
        case "tanhshrink":
            return LEVELS["tanh", bits].one_minus()
        case "softplus":
            return softplus_levels(LEVELS["softplus", bits], a, b)
        case _:
            return LEVELS[name, bits]


@functools.lru_cache(maxsize=256)
def _activation(name: str, bits: int, keep: str, a: float = 0.0, b: float = 0.0, *signs: float) -> Activation:
    if keep == "codes":
        return Activation(name, _levels(name, bits, a, b), a, b)
    two_branch = TWO_BRANCHES[name]
    return Activation(name, Levels(1, (), (two_branch.at,), (1,)), two_branch=two_branch)


@assume_constant_result
def in_dtype(number: float, dtype: torch.dtype) -> float:
    """A Python number rounded to a dtype."""
    return torch.tensor(number, dtype=dtype, device="cpu").item()


@assume_constant_result  # with dynamic=True, TorchDynamo would make variables of its numbers
def activation_of(
    name: str, bits: int, keep: str = "codes", parameters: tuple[float, float] | None = None
) -> Activation:
    """The activation of a name that saves codes of so many bits, or its output with ``keep="output"``."""
    if parameters is None:
        return _activation(name, bits, keep)
    return _activation(name, bits, keep, *parameters, *(math.copysign(1, p) for p in parameters))  # tells -0.0 from 0.0
