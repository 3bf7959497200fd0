"""Estimates the peak memory of a backward pass from the joint graph, given what is saved for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx

from .nodes import views
from .torch_internals import partitioners


class Backward:
    """A joint graph's backward pass.

    info: torch's NodeInfo. base: by node, the node that has its memory: itself, or the node of which it is a view.
    size: the bytes of such nodes. Nodes that Inductor fuses with all of their users are missing: they take no memory.
    """

    def __init__(self, graph: fx.Graph, info: Any) -> None:
        self.info, ops = info, partitioners.get_default_op_list()
        computed = [n for n in graph.nodes if n.op == "call_function"]
        self.gradients = [n for n in computed if not info.is_required_fw(n)]
        self.base = {n: views(n)[0] for n in computed}
        returned = {self.base.get(n, n) for n in graph.output_node().all_input_nodes}
        self.outputs = returned.intersection(self.gradients)
        # An elementwise operation's result takes no memory where those that use it are fused with it.
        self.size = {
            n: partitioners._size_of(n)
            for n in {*self.base.values()}
            if n.op == "call_function"
            and (n in self.outputs or not (ops.is_fusible(n) and all(map(ops.is_fusible, n.users))))
        }

    def _order(self, saved: set[fx.Node]) -> list[fx.Node]:
        """The nodes in the order of computation. A value that is not saved is computed when it is first needed."""
        computed, order = set(saved), []
        for gradient in self.gradients:
            waiting = [gradient]
            while waiting:
                node = waiting[-1]
                missing = [a for a in node.all_input_nodes if a.op == "call_function" and a not in computed]
                if node in computed or not missing:
                    waiting.pop()
                    if node not in computed:
                        computed.add(node)
                        order.append(node)
                waiting += missing
        return order

    def _storages(self, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
        return (self.base[n] for n in nodes if n in self.base)

    def peak(self, saved: Iterable[fx.Node], held_by_caller: set[fx.Node]) -> int:
        """The most bytes at one time. held_by_caller: values that are not freed when they have been used."""
        order = self._order({*saved})
        last_use: dict[fx.Node, int] = {}
        for i in reversed(range(len(order))):
            node = self.base[order[i]]
            # A fused value is computed where its users are, so that its inputs must live until its own last use.
            end = i if node in self.size else max(i, last_use.get(node, i))
            for base in self._storages(order[i].all_input_nodes):
                last_use[base] = max(end, last_use.get(base, 0))
        freed_after: dict[int, list[fx.Node]] = {}
        for base, i in last_use.items():
            freed_after.setdefault(i, []).append(base)
        # Saved values take memory, also those of operations that could be fused.
        alive = {b: partitioners._size_of(b) for b in {*self._storages(saved)} - held_by_caller}
        live = highest = sum(alive.values())
        for i, node in enumerate(order):
            base = self.base[node]
            if base in self.size and base not in alive and base not in held_by_caller:
                alive[base] = self.size[base]
                live += alive[base]
                highest = max(highest, live)
            for freed in freed_after.get(i, ()):
                if freed not in self.outputs:
                    live -= alive.pop(freed, 0)
        return highest
