"""The nodes of a joint graph: what they call, what stands for their results, which pass they are of."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

aten, prims = torch.ops.aten, torch.ops.prims

CASTS = {prims.convert_element_type, aten._to_copy, aten.clone, aten.detach, aten.alias}
VIEWS = {
    aten.view, aten._unsafe_view, aten.reshape, aten.permute, aten.transpose, aten.t, aten.expand, aten.unsqueeze,
    aten.squeeze, aten.alias, aten.detach, aten.slice, aten.select, aten.split, aten.split_with_sizes, aten.unbind,
    aten.narrow, prims.broadcast_in_dim, operator.getitem,
}  # fmt: skip


CODEC = "memkern_codec"
"""The key in a node's ``meta`` of the codec in which its value could be saved."""
NOT_AGAIN = "memkern_not_again"
"""The key of what must not be computed again where values are in codes."""
NOT_CODED = "memkern_not_coded"
"""The key of what has a norm's mean in it: codes are too coarse for a difference from it."""
_UNKNOWN_NUMEL = 2**20
"""Of a symbolic size without a hint: many elements."""


def packet(node: Any) -> Any:
    """What a node calls, without its overload."""
    return without_overload(getattr(node, "target", None))


def without_overload(target: Any) -> Any:
    return getattr(target, "overloadpacket", target)


def value(node: Any) -> Any:
    """The fake tensor (or number) that stands for a node's result."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def views(node: fx.Node) -> list[fx.Node]:
    """From what a node is a view of to the node."""
    found = [node]
    while packet(first := found[-1]) in VIEWS and len(first.all_input_nodes) == 1:
        source = first.all_input_nodes[0]
        if not isinstance(value(source), Tensor):
            break
        found.append(source)
    return found[::-1]


def arguments(node: fx.Node) -> dict[str, Any]:
    """What a node of an operation is called with, defaults too, by name; nothing of another function."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {}
    given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return given | dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | dict(node.kwargs)


def numel(node: Any) -> int:
    """Of a tensor; 1 of anything else. Of a symbolic size its hint."""
    x = value(node)
    if not isinstance(x, Tensor):
        return 1
    count = x.numel()
    return count if isinstance(count, int) else int(count.node.hint or _UNKNOWN_NUMEL)


def is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def tangents(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on a gradient of the outputs. The graph is linear in them."""
    found = {n for n in graph.nodes if n.op == "placeholder" and "tangents" in str(n.target)}
    for node in graph.nodes:
        if node.op != "output" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def is_sum_of_gradients(node: fx.Node) -> bool:
    """Of a value with several users; its sequence number is that of some other operation."""
    return (
        packet(node) is aten.add
        and is_backward(node)
        and all(isinstance(a, fx.Node) for a in node.args[:2])
        and all(is_backward(a) for a in node.all_input_nodes)
    )
