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
from .advise import Advice, advise
from .embedding import StableEmbedding
from .fit import Fit, fit_levels
from .linear import RandomizedLinear
from .mlp import MLP
from .swap import compress, restore

__all__ = [
    "GELU",
    "MLP",
    "Advice",
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
    "StableEmbedding",
    "Tanh",
    "advise",
    "compress",
    "few_bit",
    "fit_levels",
    "restore",
]
