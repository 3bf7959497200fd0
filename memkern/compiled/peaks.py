"""Estimates the peak memory of a backward pass from the joint graph, given what is saved for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx

from .nodes import views
from .torch_internals import partitioners


class Backward:
    """A joint graph's backward pass. info: torch's NodeInfo of it."""

    def __init__(self, graph: fx.Graph, info: Any) -> None:
        self.info, ops = info, partitioners.get_default_op_list()
        computed = [n for n in graph.nodes if n.op == "call_function"]
        self.gradients = [n for n in computed if not info.is_required_fw(n)]
        self.base = {n: views(n)[0] for n in computed}
        kept = {self.base.get(n, n) for n in graph.output_node().all_input_nodes}
        self.outputs = kept.intersection(self.gradients)
        # An elementwise operation's result takes no memory where those that use it are fused with it.
        self.size = {
            n: partitioners._size_of(n)
            for n in {*self.base.values()}
            if n.op == "call_function"
            and (n in self.outputs or not (ops.is_fusible(n) and all(map(ops.is_fusible, n.users))))
        }

    def _order(self, saved: set[fx.Node]) -> list[fx.Node]:
        """The nodes in the order of computation: what is not saved, when it is first needed."""
        done, order = set(saved), []
        for gradient in self.gradients:
            waiting = [gradient]
            while waiting:
                node = waiting[-1]
                missing = [a for a in node.all_input_nodes if a.op == "call_function" and a not in done]
                if node in done or not missing:
                    waiting.pop()
                    if node not in done:
                        done.add(node)
                        order.append(node)
                waiting += missing
        return order

    def _storages(self, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
        return (self.base[n] for n in nodes if n in self.base)

    def peak(self, saved: Iterable[fx.Node], of_caller: set[fx.Node]) -> int:
        """The most bytes at one time. of_caller: values that are not freed when they have been used."""
        order = self._order({*saved})
        last: dict[fx.Node, int] = {}
        for i in reversed(range(len(order))):
            node = self.base[order[i]]
            end = i if node in self.size else max(i, last.get(node, i))
            for base in self._storages(order[i].all_input_nodes):
                last[base] = max(end, last.get(base, 0))
        ends: dict[int, list[fx.Node]] = {}
        for base, i in last.items():
            ends.setdefault(i, []).append(base)
        # what is saved is there, whether or not it would have been fused
        alive = {b: partitioners._size_of(b) for b in {*self._storages(saved)} - of_caller}
        live = most = sum(alive.values())
        for i, node in enumerate(order):
            base = self.base[node]
            if base in self.size and base not in alive and base not in of_caller:
                alive[base] = self.size[base]
                live += alive[base]
                most = max(most, live)
            for freed in ends.get(i, ()):
                if freed not in self.outputs:
                    live -= alive.pop(freed, 0)
        return most
