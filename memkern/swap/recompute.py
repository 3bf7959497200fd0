"""Activations written in several operations save their input alone and are run again for the backward pass."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from ..functions.saves_input import Recompute
from .class_swap import original_class


class Recomputed(nn.Module):
    """Replaces a composite activation: the forward pass and every bit of the gradient stay."""

    def forward(self, x: Tensor) -> Tensor:
        function = functools.partial(original_class(self).forward, self)
        traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        changes_its_input = getattr(self, "inplace", False)  # set since: a second run would change it again
        if traced or changes_its_input or not (torch.is_grad_enabled() and x.requires_grad):
            return function(x)
        return Recompute.apply(x, function)
