"""Makes batch, instance and group norms of a joint graph use the normalized value in place of their input.

torch's backward pass of these norms subtracts a multiple of the mean from a multiple of the input x, for which codes of
x are too coarse. Codes of ``normalized = (x - mean) * inverse`` serve it, and so the norm gets::

    x' = normalized / inverse + mean

wherever it uses x, except for its statistics and for what is normalized: x to within rounding, but never saved itself.
Layer norms have ``codable.share_normalized``, as torch's own backward pass uses what is normalized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, fx

from . import codecs
from .nodes import NOT_CODED, aten, is_backward, packet
from .operations import Operation, Operations

NAMES = {"native_batch_norm", "native_group_norm"}


class _Norm(NamedTuple):
    """Nodes of a norm: its input x, the mean, 1 / deviation (inverse), and the normalized value.

    normalized: None where no node has this value.
    sources: the input, and its casts and views from which statistics and differences are computed.
    """

    x: fx.Node
    mean: fx.Node
    inverse: fx.Node
    normalized: fx.Node | None
    sources: list[fx.Node]


def use_normalized(graph: fx.Graph) -> None:
    """Rewrites the norms of a joint graph whose input is computed in the graph."""
    operations = Operations(graph)
    for op in operations.by_seq.values():
        norm = _match(op) if op.name in NAMES and op.seq in operations.differentiated else None
        if norm is not None and norm.x.op == "call_function":
            _rewrite(graph, op, norm)


def _match(op: Operation) -> _Norm | None:
    """The nodes of a norm; None for one that is written in another way."""
    statistics = next((n for n in op.nodes if packet(n) is aten.var_mean), None)
    normalized: Any = next(
        (n for n in op.nodes if packet(n) is aten.mul and packet(n.args[0]) is aten.sub and n.args[0] in op.nodes), None
    )
    source: Any
    if normalized is not None:
        (source, mean), inverse = normalized.args[0].args, normalized.args[1]
    elif statistics is not None:  # a group norm with weights: x * (weight * inverse) + (bias - mean * weight * inverse)
        source = statistics.args[0]
        mean = next((n for n in statistics.users if n.args[1] == 1), None)
        inverse = next((n for n in op.nodes if packet(n) is aten.rsqrt), None)
    else:
        return None
    if not all(isinstance(n, fx.Node) for n in (source, mean, inverse)):
        return None
    between = _between(source, op)
    x = between[-1].all_input_nodes[0] if between else source
    of_statistics = _between(statistics.args[0], op) if statistics else []
    return _Norm(x, mean, inverse, normalized, [source, *between, *of_statistics, x])


def _between(source: Any, op: Operation) -> list[fx.Node]:
    """The norm's own nodes from its input to one of its operands: casts and views."""
    steps = []
    while source in op.nodes and len(source.all_input_nodes) == 1:
        steps.append(source)
        source = source.all_input_nodes[0]
    return steps


def _rewrite(graph: fx.Graph, op: Operation, norm: _Norm) -> None:
    """Replaces later uses of a norm's input by what is computed from the normalized value."""
    last = max(n for n in (norm.mean, norm.inverse, norm.normalized) if n is not None)

    def users_of(source: fx.Node) -> list[fx.Node]:
        """The norm's nodes that use the source later: not for the statistics or what is normalized."""
        return [u for u in source.users if u.meta.get("seq_nr") == op.seq and u > last]

    users_by_source = {source: users_of(source) for source in norm.sources}
    if not any(is_backward(u) for users in users_by_source.values() for u in users):
        return
    normalized = norm.normalized
    if normalized is None:
        function = lambda source, mean, inverse: (source - mean) * inverse  # noqa: E731
        last = normalized = _add(graph, op, last, function, norm.sources[0], norm.mean, norm.inverse)
    function = lambda y, mean, inverse: y / inverse + mean  # noqa: E731
    last = again = _add(graph, op, last, function, normalized, norm.mean, norm.inverse)
    again.meta[NOT_CODED] = True
    for source, users in users_by_source.items():
        if users:
            restore = lambda y, x: y.view(x.shape).to(x.dtype)  # noqa: E731
            last = replacement = _add(graph, op, last, restore, again, source)
            for node in (replacement, *users):
                node.meta[NOT_CODED] = True
            for user in users:
                user.replace_input_with(source, replacement)


def _add(graph: fx.Graph, op: Operation, last: fx.Node, function: Callable[..., Tensor], *nodes: fx.Node) -> fx.Node:
    """Adds operations of the norm's forward pass behind a node."""
    nodes_before: Iterable[fx.Node] = set(graph.nodes)
    with graph.inserting_before(last.next):
        result = codecs.inline(graph, function, *nodes)
    for node in set(graph.nodes).difference(nodes_before):
        of_first = op.nodes[0].meta
        node.meta.update(seq_nr=op.seq, original_aten=of_first.get("original_aten"), partitioner_tag="is_forward")
    return result
