"""Marks functions whose results are constants for TorchDynamo, and has a rule for torch.vmap. Imports neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def assume_constant_result(function: Function) -> Function:
    """torch.compiler.assume_constant_result, which imports TorchDynamo (2 s) to set this attribute."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def vmap_one_by_one(function: Callable[..., Any], info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, int]:
    """torch.vmap's rule: the function of each example, stacked. (torch's own way to do so warns that it is slow.)"""
    results = []
    for i in range(info.batch_size):
        # Contiguous: codes are in the memory order of the result, which torch.stack makes contiguous.
        example = [
            x.select(dim, i).contiguous() if isinstance(x, Tensor) and dim is not None else x
            for x, dim in zip(args, in_dims, strict=True)
        ]
        results.append(function(*example))
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(
        torch.stack(each) if isinstance(each[0], Tensor) else each[0] for each in zip(*results, strict=True)
    ), 0
