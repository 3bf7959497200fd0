"""Saves codes of an activation's derivative in place of its input, where the backward pass uses the input for no more.

memkern's modules save the same codes (:mod:`memkern.functions.activation`); here no module is swapped. Where the
backward pass uses the input for anything else, too, the input stays saved and the derivative is computed from it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor, fx

from .. import _ops
from ..fewbit.activations import activation_of
from ..fewbit.levels import Levels, check_bits
from ..quant.codec import MAX_BITS
from ..quant.layout import FLOATS
from . import codecs
from .nodes import aten, is_backward, numel, packet, value
from .operations import Operation, Operations
from .rules import MIN_NUMEL
from .torch_internals import is_contiguous_or_false

_NAMES = {
    aten.gelu: "gelu",
    aten.silu: "silu",
    aten.mish: "mish",
    aten.hardswish: "hardswish",
    aten.log_sigmoid_forward: "logsigmoid",
}
"""By operation, the activation that it computes. Parameters of others cannot be read off decomposed nodes."""


def check(bits: int | None) -> None:
    if bits is None:
        return
    try:
        check_bits(bits)
    except ValueError:
        raise ValueError(f"activations must be from 1 to {MAX_BITS} bits or None, got {bits!r}") from None


class Derivative(NamedTuple):
    """An activation's backward pass, ``result = gradient * f'(x)``, as nodes of the backward graph.

    unused: the nodes that nothing needs any more once the result is computed from codes of f'(x).
    """

    x: fx.Node  # of the forward graph
    levels: Levels
    gradient: fx.Node
    result: fx.Node
    unused: set[fx.Node]


def _levels(operation: Operation, bits: int) -> Levels | None:
    """The levels of an activation's derivative; None for other operations."""
    name = _NAMES.get(operation.op)
    if name == "gelu" and any(packet(node) is aten.tanh for node in operation.nodes):
        name = "gelu_tanh"
    return None if name is None else activation_of(name, bits).levels


def _unused_without(result: fx.Node, gradient: fx.Node) -> set[fx.Node]:
    """The nodes that nothing uses any more once another node has taken the place of ``result``, and ``result``."""
    unused = {result}
    for node in reversed(result.graph.nodes):
        if node is not gradient and node.users and unused.issuperset(node.users):
            unused.add(node)
    return unused


def derivatives(
    fw: fx.Graph, bw: fx.Graph, operations: Operations, gradients: set[fx.Node], bits: int
) -> list[Derivative]:
    """The activations of a graph whose derivative could be saved in ``bits`` bits per element."""
    nodes_by_seq: dict[int, set[fx.Node]] = {}
    for node in gradients:
        if is_backward(node) and operations.of(node).op in _NAMES:
            nodes_by_seq.setdefault(operations.of(node).seq, set()).add(node)
    named = {node.name: node for node in fw.nodes}
    results = []
    for seq, nodes in nodes_by_seq.items():
        operation = operations.by_seq[seq]
        levels = _levels(operation, bits)
        x = named.get(next(a.name for n in operation.nodes for a in n.all_input_nodes if a.name not in operation.names))
        # The gradients that the activation's backward pass takes, and those that it returns. One each can be replaced.
        entering = {a for n in nodes for a in n.all_input_nodes if a in gradients and a not in nodes}
        leaving = [n for n in nodes if any(u not in nodes for u in n.users)]
        if levels is None or x is None or len(entering) != 1 or len(leaving) != 1:
            continue
        gradient, result, fake = entering.pop(), leaving[0], value(x)
        are_alike = all(
            isinstance(value(n), Tensor) and (value(n).shape, value(n).dtype) == (fake.shape, fake.dtype)
            for n in (gradient, result)
        )
        if are_alike and fake.dtype in FLOATS and numel(x) >= MIN_NUMEL and is_contiguous_or_false(fake):
            results.append(Derivative(x, levels, gradient, result, _unused_without(result, gradient)))
    return results


def encode(graph: fx.Graph, derivative: Derivative) -> fx.Node:
    """Codes of the derivative, in the forward graph."""
    with graph.inserting_before(derivative.x.next):
        return codecs.inline(graph, functools.partial(_ops.few_bit_encode, table=derivative.levels), derivative.x)


def use(graph: fx.Graph, derivative: Derivative, codes: fx.Node) -> None:
    """Multiplies the gradient by the levels of the codes, in place of its ``result`` in the backward graph."""

    def run(gradient: Tensor, codes: Tensor) -> Tensor:
        return _ops.few_bit_backward(gradient.contiguous(), codes, derivative.levels.levels)

    meta: dict[str, Any] = {k: v for k, v in derivative.result.meta.items() if k not in ("val", "tensor_meta")}
    nodes_before = set(graph.nodes)
    with graph.inserting_before(derivative.result):
        product = codecs.inline(graph, run, derivative.gradient, codes)
    for node in set(graph.nodes) - nodes_before:
        node.meta = {**meta, **node.meta}
    derivative.result.replace_all_uses_with(product)
