"""Modules that keep less for the backward pass."""

from .activation import (
    GELU,
    FewBit,
    Hardswish,
    Hardtanh,
    LeakyReLU,
    Mish,
    QuickGELU,
    ReLU,
    Sigmoid,
    SiLU,
    Softplus,
    Tanh,
    few_bit,
)
from .fit import Fit, fit_levels
from .linear import RandomizedLinear

__all__ = [
    "GELU",
    "FewBit",
    "Fit",
    "Hardswish",
    "Hardtanh",
    "LeakyReLU",
    "Mish",
    "QuickGELU",
    "RandomizedLinear",
    "ReLU",
    "SiLU",
    "Sigmoid",
    "Softplus",
    "Tanh",
    "few_bit",
    "fit_levels",
]
