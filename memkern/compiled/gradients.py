"""Tells how large the gradients in a joint graph may be, by the operations between them and the outputs."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator

from torch import fx

from .nodes import COPIES, VIEWS, aten, dependent_on_tangents, is_sum_of_gradients, numel, packet, prims, value
from .operations import Operation, Operations
from .torch_internals import guard_or_false, statically_known_true

# How large the gradient that comes to an operation's output may be, by the operations after it.
UNKNOWN = 0  # none of them tells
BOUNDED = 1  # of a product, a norm or a loss: an error of codes stays as large as it is
REDUCED = 2  # of a division or logarithm of a sum or mean over many elements
AMPLIFIED = 3  # of a division, a logarithm or an unknown operation: errors may be divided by small values

_READS_ONE_OF_EACH_ROW = ("nll_loss", "nll_loss2d", "gather")  # operations; gather, where it has one index
_KEEPS_ROWS = (VIEWS | COPIES) - {aten.expand, prims.broadcast_in_dim}
_MANY = 32  # elements from which on a mean is one of many: each is a small part of it


def _is_square(operation: Operation) -> bool:
    """Whether it is x ** 2 or x * x. With a mean over many it is a norm, which bounds its own gradient."""
    args = operation.nodes[0].args
    if operation.name == "pow":
        return bool(args[1] == 2)
    return operation.name == "mul" and args[0] is args[1]


def _is_mean_of_many(operation: Operation) -> bool:
    """Whether an operation is a mean over many elements; with a guard for symbolic sizes, as codes depend on it."""
    if operation.name != "mean":
        return False
    source, mean = value(operation.first_source), value(operation.nodes[0])
    return bool(guard_or_false(source.numel() >= _MANY * mean.numel()))


def _state_at_inputs(operation: Operation, state: int) -> int:
    """How large the gradient may be at an operation's inputs, given that at its output (UNKNOWN to AMPLIFIED)."""
    kind = operation.row.kind
    if kind == "product":
        return BOUNDED
    if kind == "singular":
        return AMPLIFIED
    if state == REDUCED and _is_square(operation):
        return BOUNDED
    if state == AMPLIFIED and _is_mean_of_many(operation):
        return REDUCED
    return state


def _is_sparse_at_inputs(operation: Operation, is_sparse: bool) -> bool:
    """Whether the gradient at an operation's inputs is sparse, given whether that at its output is."""
    if operation.name not in _READS_ONE_OF_EACH_ROW:
        return is_sparse and operation.op in _KEEPS_ROWS
    if operation.name != "gather":
        return True
    _, dim, index = operation.nodes[0].args[:3]
    return bool(statically_known_true(value(index).shape[dim] == 1)) if value(index).dim() else False


_WORSE = {BOUNDED: 0, REDUCED: 1, UNKNOWN: 2, AMPLIFIED: 3}  # the order in which _worst compares


@dataclasses.dataclass(frozen=True)
class Gradient:
    """How large a gradient may be (BOUNDED to AMPLIFIED), and whether it is sparse: one element of each row is not 0.

    log_softmax's backward pass computes g - p * sum(g). With a sparse g, of a loss of classes, its elements are p and
    the small 1 - p, for which codes of p serve. With soft targets q, of which the classes of two losses are two, it is
    p - q, a difference of close numbers, for which they do not.
    """

    state: int
    is_sparse: bool


def _worst(gradients: Iterable[Gradient]) -> Gradient:
    gradients = list(gradients)
    return Gradient(max((g.state for g in gradients), key=_WORSE.__getitem__), all(g.is_sparse for g in gradients))


class Gradients:
    """The gradients at the outputs and inputs of each operation of a joint graph."""

    def __init__(self, graph: fx.Graph, operations: Operations) -> None:
        self.nodes = dependent_on_tangents(graph)
        self.operations = operations
        self.at_output: dict[fx.Node, Gradient] = {}  # by node: the gradient at the output of its operation
        self._at_inputs: dict[fx.Node, Gradient] = {}
        for node in graph.nodes:
            if node in self.nodes:
                self._add(node)

    def sources(self, node: fx.Node) -> Iterator[fx.Node]:
        return (a for a in node.all_input_nodes if a in self.nodes)

    def _add(self, node: fx.Node) -> None:
        """Notes the gradients at the output of a node's operation, and at its inputs."""
        if node.op == "placeholder":
            state = BOUNDED if numel(node) == 1 else UNKNOWN
            self.at_output[node] = self._at_inputs[node] = Gradient(state, is_sparse=False)
            return
        if is_sum_of_gradients(node) or packet(node) is operator.getitem:
            worst = _worst(self._at_inputs[s] for s in self.sources(node))
            is_sparse = worst.is_sparse and not is_sum_of_gradients(node)
            self.at_output[node] = self._at_inputs[node] = Gradient(worst.state, is_sparse)
            return
        op = self.operations.of(node)
        inside = [s for s in self.sources(node) if self._is_inside(s, op)]
        outside = [self._at_inputs[s] for s in self.sources(node) if s not in inside]
        self.at_output[node] = _worst([*outside, *(self.at_output[s] for s in inside)])
        passed_on = (Gradient(_state_at_inputs(op, g.state), _is_sparse_at_inputs(op, g.is_sparse)) for g in outside)
        self._at_inputs[node] = _worst([*(self._at_inputs[s] for s in inside), *passed_on])

    def _is_inside(self, source: fx.Node, op: Operation) -> bool:
        return (
            source.op == "call_function"
            and not is_sum_of_gradients(source)
            and op.seq >= 0
            and source.meta.get("seq_nr") == op.seq
        )

    def bears_codes(self, node: fx.Node) -> bool:
        """Whether what an elementwise operation uses in this node may be in codes."""
        state = self.at_output[node].state
        op = self.operations.of(node)
        return state == BOUNDED or (state == REDUCED and bool(op.nodes) and _is_square(op))

    def is_sparse(self, node: fx.Node) -> bool:
        """Whether the gradient at the output of a node's operation has one element of each row."""
        return self.at_output[node].is_sparse
