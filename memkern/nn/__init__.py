"""Modules that save less for the backward pass."""

from __future__ import annotations

from ..fewbit.fit import Fit, fit_levels
from .activation import (
    CELU,
    ELU,
    GELU,
    SELU,
    FewBit,
    Hardshrink,
    Hardsigmoid,
    Hardswish,
    Hardtanh,
    LeakyReLU,
    LogSigmoid,
    Mish,
    QuickGELU,
    ReLU,
    Sigmoid,
    SiLU,
    Softplus,
    Softshrink,
    Softsign,
    Tanh,
    Tanhshrink,
    Threshold,
    few_bit,
)
from .embedding import StableEmbedding
from .linear import RandomizedLinear
from .loss import LinearCrossEntropy

__all__ = [
    "CELU",
    "ELU",
    "GELU",
    "SELU",
    "FewBit",
    "Fit",
    "Hardshrink",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "LeakyReLU",
    "LinearCrossEntropy",
    "LogSigmoid",
    "Mish",
    "QuickGELU",
    "RandomizedLinear",
    "ReLU",
    "SiLU",
    "Sigmoid",
    "Softplus",
    "Softshrink",
    "Softsign",
    "StableEmbedding",
    "Tanh",
    "Tanhshrink",
    "Threshold",
    "few_bit",
    "fit_levels",
]
