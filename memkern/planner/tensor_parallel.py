"""What a device holds of a model that tensor parallelism shards, by the ``tp_plan`` of transformers.

A column-wise layer has its rows of the weight and returns its part of the features; a row-wise one has its columns, and
its outputs are summed over the devices (Megatron-LM, arXiv:1909.08053). The residual stream and what is in no plan are
whole on every device. The collectives are here as operators that allocate what DTensor's do.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

COLUMNS = {"colwise", "colwise_gather_output", "colwise_rep"}
GATHERED = COLUMNS - {"colwise"}
WHOLE = {"replicated_with_grad_allreduce", "replicate"}
STYLES = {nn.Linear: COLUMNS | {"rowwise"}, nn.Embedding: {"embedding_rowwise"}}


class _SumOfGradients(torch.autograd.Function):
    """The input of a column-wise layer, whose gradient is summed over the devices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


class _Sum(torch.autograd.Function):
    """The output of a row-wise layer, summed over the devices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)


class _Gathered(torch.autograd.Function):
    """The output of a column-wise layer with the features of all devices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int) -> Tensor:
        ctx.width = x.shape[-1]
        devices = -(-width // x.shape[-1])
        gathered = x.new_empty(devices * x.shape[0], *x.shape[1:])
        return torch.cat(gathered.chunk(devices), -1)[..., :width]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[..., : ctx.width].contiguous(), None


def layers_of_plan(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """The names, styles and modules of a model's plan."""
    plan = getattr(model, "_tp_plan", None) or {}
    for name, module in model.named_modules():
        style = plan.get(name) or plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))
        if style:
            yield name, style, module


def parallelize(model: nn.Module, devices: int) -> None:
    """Leaves each layer of the plan what the first device has of it, in place. Call with meta tensors."""
    made: dict[Tensor, nn.Parameter] = {}  # tied weights stay tied
    for _, style, module in layers_of_plan(model):
        if style in WHOLE:
            continue
        is_row_wise = style == "rowwise"
        width = module.weight.shape[0]
        for name, p in module.named_parameters(recurse=False):
            if p not in made:
                shape = list(p.shape)
                if not (is_row_wise and name == "bias"):
                    shape[is_row_wise] = -(-shape[is_row_wise] // devices)
                made[p] = nn.Parameter(p.new_empty(shape), p.requires_grad)
            setattr(module, name, made[p])
        if style in COLUMNS:
            module.register_forward_pre_hook(_before_columns)
        if style in GATHERED:
            module.register_forward_hook(functools.partial(_after_columns, width))
        if style not in COLUMNS:
            module.register_forward_hook(_after_rows)


def _before_columns(module: nn.Module, args: Any) -> Any:
    return (_SumOfGradients.apply(args[0]), *args[1:])


def _after_columns(width: int, module: nn.Module, args: Any, out: Tensor) -> Any:
    return _Gathered.apply(out, width)


def _after_rows(module: nn.Module, args: Any, out: Tensor) -> Any:
    return _Sum.apply(out)
