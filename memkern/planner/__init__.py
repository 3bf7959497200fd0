"""Predicts what a training step needs, by category and technique, and chooses what fits: ``memkern.plan``."""

from .hardware import Hardware
from .outcome import Plan
from .planning import plan
from .prediction import Prediction

__all__ = ["Hardware", "Plan", "Prediction", "plan"]
