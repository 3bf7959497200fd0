"""An autograd function that saves its input alone and runs a function of it again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .autograd import autocast_dtype
from .derivative import Chain

Function = Callable[[Tensor], Tensor]


class _Under(NamedTuple):
    """A function with the autocast state that it has been called under, whatever the state is later."""

    function: Function
    dtype: torch.dtype | None

    def __call__(self, x: Tensor) -> Tensor:
        device = x.device.type
        if self.dtype is None and autocast_dtype(device) is None:
            return self.function(x)
        with torch.autocast(device, self.dtype, enabled=self.dtype is not None, cache_enabled=False):
            return self.function(x)


def _as_it_is(x: Tensor) -> Tensor:
    return x


class Recompute(torch.autograd.Function):
    """function(x), of which x is saved.

    chain: the operations of the function, where they are known. Then the backward pass calls their kernels alone;
    else, for a second derivative, or with autocast around it, the function is run again by autograd.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Function, chain: Chain | None = None) -> Tensor:
        ctx.save_for_backward(x)
        autocast = autocast_dtype(x.device.type)
        ctx.function = _Under(function, autocast)
        ctx.gradient = None if chain is None else chain.gradient(x, autocast)
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        differentiable = torch.is_grad_enabled()  # create_graph=True
        if ctx.gradient is not None and not differentiable and autocast_dtype(x.device.type) is None:
            return ctx.gradient(x, grad), None, None
        if not differentiable:
            x = x.detach().requires_grad_()
        # What is saved here is used up at once: hooks that are open around the backward pass have no part in it.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            y = ctx.function(x)
            return torch.autograd.grad(y, x, grad, create_graph=differentiable)[0], None, None
