"""An autograd function that saves its input alone and runs a function of it again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def _under_the_autocast_of_now(x: Tensor, function: Function) -> Function:
    """The function with the autocast state that it has been called under, whatever the state is later."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device):
        return function
    state = torch.autocast(
        device,
        torch.get_autocast_dtype(device),
        enabled=torch.is_autocast_enabled(device),
        cache_enabled=False,
    )
    return state(function)


def _as_it_is(x: Tensor) -> Tensor:
    return x


class Recompute(torch.autograd.Function):
    """function(x), of which x is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Function) -> Tensor:
        ctx.save_for_backward(x)
        ctx.function = _under_the_autocast_of_now(x, function)
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        differentiable = torch.is_grad_enabled()  # create_graph=True
        if not differentiable:
            x = x.detach().requires_grad_()
        # What is saved here is used up at once: hooks that are open around the backward pass have no part in it.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            y = ctx.function(x)
            return torch.autograd.grad(y, x, grad, create_graph=differentiable)[0], None
