"""Predicts what a training step needs, by category and technique, and chooses what fits: ``memkern.plan``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hardware import Hardware
    from .outcome import Plan
    from .planning import plan
    from .prediction import Prediction

__all__ = ["Hardware", "Plan", "Prediction", "plan"]

_MODULES = {
    "Hardware": "hardware",
    "Plan": "outcome",
    "Prediction": "prediction",
    "plan": "planning",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
