"""How large the gradients in a joint graph may be, as far as it shows those that come to its outputs."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator

from torch import fx

from ..saved.users import AMPLIFIED, BOUNDED, MANY, MEANS, REDUCED, SPARSE, UNKNOWN, passed_on, spread
from .nodes import is_sum_of_gradients, numel, packet, tangents, value
from .operations import Operation, Operations
from .torch_internals import guard_or_false


def _is_square(operation: Operation, name: str) -> bool:
    args = operation.nodes[0].args
    if name == "PowBackward0":
        return bool(args[1] == 2)
    return name == "MulBackward0" and args[0] is args[1]


def _is_mean_of_many(operation: Operation, name: str) -> bool:
    """With a guard for symbolic sizes: what may be coded depends on it."""
    if name not in MEANS:
        return False
    of, mean = value(operation.first_source), value(operation.nodes[0])
    return bool(guard_or_false(of.numel() >= MANY * mean.numel()))


_WORSE = {BOUNDED: 0, REDUCED: 1, UNKNOWN: 2, AMPLIFIED: 3}


@dataclasses.dataclass(frozen=True)
class Gradient:
    """How large a gradient may be (BOUNDED to AMPLIFIED), and of which elements it is (0, SPARSE or DENSE)."""

    state: int
    elements: int


def _worst(of: Iterable[Gradient]) -> Gradient:
    of = list(of)
    return Gradient(max((g.state for g in of), key=_WORSE.__getitem__), max(g.elements for g in of))


class Gradients:
    """The gradients that come to the operations of a graph, as far as it shows those that come to its outputs."""

    def __init__(self, graph: fx.Graph, operations: Operations) -> None:
        self.nodes = tangents(graph)
        self.operations = operations
        self.coming: dict[fx.Node, Gradient] = {}  # to the output of a node's operation
        self._leaving: dict[fx.Node, Gradient] = {}
        for node in graph.nodes:
            if node in self.nodes:
                self._add(node)

    def sources(self, node: fx.Node) -> Iterator[fx.Node]:
        return (a for a in node.all_input_nodes if a in self.nodes)

    def _add(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.coming[node] = self._leaving[node] = Gradient(BOUNDED if numel(node) == 1 else UNKNOWN, 0)
            return
        if is_sum_of_gradients(node) or packet(node) is operator.getitem:
            self.coming[node] = self._leaving[node] = _worst(self._leaving[s] for s in self.sources(node))
            return
        of = self.operations.of(node)
        inside = [s for s in self.sources(node) if self._is_inside(s, of)]
        outside = [self._leaving[s] for s in self.sources(node) if s not in inside]
        self.coming[node] = _worst([*outside, *(self.coming[s] for s in inside)])
        passed = [self._leaving[s] for s in inside]
        for g in outside:
            state = passed_on(of.row, of, of.name, g.state, _is_square, _is_mean_of_many)
            passed.append(Gradient(state, spread(of.row, of.name, g.elements)))
        self._leaving[node] = _worst(passed)

    def _is_inside(self, source: fx.Node, of: Operation) -> bool:
        return (
            source.op == "call_function"
            and not is_sum_of_gradients(source)
            and of.seq >= 0
            and source.meta.get("seq_nr") == of.seq
        )

    def bears_codes(self, node: fx.Node) -> bool:
        """Whether what an elementwise operation uses in this node may be in codes."""
        state = self.coming[node].state
        of = self.operations.of(node)
        return state == BOUNDED or (state == REDUCED and bool(of.nodes) and _is_square(of, of.name))

    def is_sparse(self, node: fx.Node) -> bool:
        return self.coming[node].elements == SPARSE
