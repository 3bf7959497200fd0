"""Reads the nodes of a joint graph: what they call, with which arguments, their fake results, and their pass."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from sympy import Integer
from torch import Tensor, fx

aten, prims = torch.ops.aten, torch.ops.prims

COPIES = {prims.convert_element_type, aten._to_copy, aten.clone, aten.detach, aten.alias}
"""Operations whose result has the values and the shape of their input, in another dtype or not."""
VIEWS = {
    aten.view, aten._unsafe_view, aten.reshape, aten.permute, aten.transpose, aten.t, aten.expand, aten.unsqueeze,
    aten.squeeze, aten.alias, aten.detach, aten.slice, aten.select, aten.split, aten.split_with_sizes, aten.unbind,
    aten.narrow, prims.broadcast_in_dim, operator.getitem,
}  # fmt: skip


# Keys in a node's ``meta``
CODEC = "memkern_codec"
"""The name of the codec in which the value may be saved."""
NOT_AGAIN = "memkern_not_again"
"""True for a value that must not be computed again from codes."""
NOT_CODED = "memkern_not_coded"
"""True for a value that contains a norm's mean: codes are too coarse for its difference from the mean."""
_SYMBOL = 2**12
"""The size that stands for a symbolic one. Its hint is that of the first call, which must not decide for later ones."""


def packet(node: Any) -> Any:
    """What a node calls, without its overload."""
    return without_overload(getattr(node, "target", None))


def without_overload(target: Any) -> Any:
    return getattr(target, "overloadpacket", target)


def value(node: Any) -> Any:
    """The fake tensor (or number) that stands for a node's result."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def views(node: fx.Node) -> list[fx.Node]:
    """The chain of views from the node that has the memory of a node to the node itself."""
    bases = [node]
    while packet(last := bases[-1]) in VIEWS and len(last.all_input_nodes) == 1:
        source = last.all_input_nodes[0]
        if not isinstance(value(source), Tensor):
            break
        bases.append(source)
    return bases[::-1]


def arguments(node: fx.Node) -> dict[str, Any]:
    """What a node of an operation is called with, defaults too, by name; empty for a function that is no operation."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {}
    values = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return values | dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | dict(node.kwargs)


def number(size: int | torch.SymInt, fallback: int = _SYMBOL, symbols: Mapping[Any, int] | None = None) -> int:
    """A size as an int: a symbolic one with each symbol's number in ``symbols``, or _SYMBOL, in place of the symbol.

    fallback: the result where the expression of the symbols then divides by 0.
    """
    if isinstance(size, int):
        return size
    expression = size.node.expr
    numbers = {s: Integer((symbols or {}).get(s, _SYMBOL)) for s in expression.free_symbols}
    try:
        return int(expression.xreplace(numbers))
    except ZeroDivisionError:
        return fallback


def numel(node: Any) -> int:
    """The number of elements of a node's tensor; 1 for anything else."""
    x = value(node)
    return number(x.numel()) if isinstance(x, Tensor) else 1


def is_backward(node: fx.Node) -> bool:
    """Whether a node is of the backward pass."""
    return node.meta.get("partitioner_tag") == "is_backward"


def dependent_on_tangents(graph: fx.Graph) -> set[fx.Node]:
    """The tangents (gradients of the outputs) and all nodes that depend on them; these are linear in the tangents."""
    dependent = {n for n in graph.nodes if n.op == "placeholder" and "tangents" in str(n.target)}
    for node in graph.nodes:
        if node.op != "output" and not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    return dependent


def is_sum_of_gradients(node: fx.Node) -> bool:
    """Whether a node adds gradients of a value that has several users; its sequence number is another operation's."""
    return (
        packet(node) is aten.add
        and is_backward(node)
        and all(isinstance(a, fx.Node) for a in node.args[:2])
        and all(is_backward(a) for a in node.all_input_nodes)
    )
