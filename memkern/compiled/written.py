"""Copies the inputs that a joint graph writes (a running mean, a counter, a cache); all nodes read the copies instead.

The backward pass runs when the inputs are written already. What it computes again from such an input it would compute
from the new value, and an update would be applied twice. So everything reads a copy of the input instead, made at the
beginning of the forward pass and never again: torch's cut saves the copy or what is made of it, whichever is less.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

from . import codecs
from .nodes import arguments, is_backward, views

_COPY = "memkern_copy"
"""The key in the ``meta`` of nodes that are such copies."""


def _writes(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Nodes of the forward pass that write what they are given, with the input that each of them writes."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable or is_backward(node):
            continue
        if node.meta.get("partitioner_tag") == "must_be_in_backward":
            continue
        given = arguments(node)
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for x in tree_leaves(given[argument.name]):
                    if isinstance(x, fx.Node) and views(x)[0].op == "placeholder":
                        yield node, views(x)[0]


def read_copies(graph: fx.Graph, returned: int) -> None:
    """Puts a copy in place of each input that the forward pass writes, or that is written right after it.

    returned: the number of outputs of the forward pass, which come first.
    """
    output = graph.output_node()
    writes = list(_writes(graph))
    described = {getattr(description, "mutated_input", None) for description in output.meta.get("desc", ())} - {None}
    inputs = graph.find_nodes(op="placeholder")
    written = {x for _, x in writes} | {x for x in inputs if x.meta.get("desc") in described}
    with graph.inserting_before(inputs[-1].next if inputs else None):
        copies = {x: codecs.inline(graph, Tensor.clone, x) for x in inputs if x in written}
    writing = {node for node, _ in writes}
    for x, copy in copies.items():
        copy.meta |= {_COPY: True, "recompute": CheckpointPolicy.MUST_SAVE}
        x.replace_all_uses_with(copy, delete_user_cb=lambda user: user not in {*writing, output, *copies.values()})
    given: Any = output.args[0]
    of_backward = tree_map_only(fx.Node, lambda x: copies.get(x, x), given[returned:])
    output.args = ((*given[:returned], *of_backward),)


def claim_copies(graph: fx.Graph, info: Any) -> None:
    """Tells torch's NodeInfo that the copies are of the forward pass, also where no other node of it needs them."""
    for node in graph.nodes:
        if _COPY in node.meta and not info.is_required_fw(node):
            info._required_fw_nodes.add(node)
            info.unclaimed_nodes.discard(node)
            info.fw_order[node] = -1


def drop_unsaved_copies(fw: fx.GraphModule) -> None:
    """Removes copies that are not saved from the graph of the forward pass."""
    saved = {views(x)[0] for x in fw.graph.output_node().all_input_nodes}
    for node in list(fw.graph.nodes):
        if _COPY in node.meta and node not in saved:
            node.replace_all_uses_with(node.all_input_nodes[0])
            fw.graph.erase_node(node)
    fw.recompile()
