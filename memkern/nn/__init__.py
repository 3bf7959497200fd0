"""Modules that save less for the backward pass."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from ..swap.compress import compress, restore

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
    "compress",
    "few_bit",
    "fit_levels",
    "restore",
]

# memkern.swap is built from the modules here; its functions are loaded on first use.
_LAZY = {"compress": "compress", "restore": "compress"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"..swap.{_LAZY[name]}", __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
