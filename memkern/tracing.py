"""For torch.compile, a mark for functions with constant results; for torch.vmap, a rule. Imports neither of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

Function = TypeVar("Function", bound=Callable[..., Any])


def assume_constant_result(function: Function) -> Function:
    """Marks a function for torch.compile: its result is computed while tracing and is a constant of the graph.

    torch.compiler.assume_constant_result sets the same attribute, but imports TorchDynamo for it, which takes 2 s.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def vmap_one_by_one(function: Callable[..., Any], info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, int]:
    """The ``vmap`` rule of an operator without one of its own: calls it for each example and stacks the results.

    Called by torch.vmap with the operator's arguments, and for each the dimension of the examples (``in_dims``, None
    where they share it). Returns the result and its dimension. (torch's own fallback does the same with a warning.)
    """
    if info.batch_size == 0:  # a batch of one example, of zeros, tells the shapes and dtypes of the results
        args = tuple(
            x.sum(dim, keepdim=True, dtype=x.dtype) if isinstance(x, Tensor) and dim is not None else x
            for x, dim in zip(args, in_dims, strict=True)
        )
        one, place = vmap_one_by_one(function, info._replace(batch_size=1), in_dims, *args)
        return tree_map_only(Tensor, lambda x: x[:0], one), place
    results = []
    for i in range(info.batch_size):
        example = [
            x.select(dim, i) if isinstance(x, Tensor) and dim is not None else x
            for x, dim in zip(args, in_dims, strict=True)
        ]
        results.append(function(*example))
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(
        torch.stack(each) if isinstance(each[0], Tensor) else each[0] for each in zip(*results, strict=True)
    ), 0
