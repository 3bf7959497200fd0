"""RandomizedConv1D as a subclass of transformers' Conv1D, for libraries that test with isinstance (PEFT)."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

from . import linear


class RandomizedConv1D(linear.RandomizedConv1D, Conv1D):
    """The randomized layer that ``memkern.compress`` puts in place of transformers' own class."""

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)  # Conv1D's names Conv1D
