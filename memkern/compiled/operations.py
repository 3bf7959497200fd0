"""Groups a joint graph's nodes by operation, each with its row in the tables of :mod:`memkern.compiled.rules`.

A joint graph holds the forward and the backward pass of a compiled function, written in primitive operations. torch
gives all nodes of one operation, and those of its backward pass, one sequence number (``seq_nr``), and each node the
operation that was decomposed into it (``original_aten``). So a node of the graph is known by the name of its operation
in ATen, such as ``silu``, for which the tables have a row.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

from torch import Tensor, fx

from .nodes import (
    COPIES,
    VIEWS,
    aten,
    dependent_on_tangents,
    is_backward,
    is_sum_of_gradients,
    packet,
    prims,
    value,
    without_overload,
)
from .rules import MOST_EXPONENT, SCALED, UNKNOWN_USER, USERS, User, row_of_power

_ALIASES = {
    "aten._unsafe_index": "aten.index",
    "transformers.grouped_mm_fallback": "aten._grouped_mm",  # experts in fp32, whose loop torch.compile does not see
    **dict.fromkeys(
        (
            "aten._native_batch_norm_legit_functional",
            "aten._native_batch_norm_legit",
            "aten._native_batch_norm_legit_no_training",
            "aten._batch_norm_with_update_functional",
            "aten._batch_norm_no_update",
        ),
        "aten.native_batch_norm",
    ),
}
"""The names that the tables have for operations under other names."""
_AFFINE = {
    aten.mul, aten.add, aten.div, prims.convert_element_type, aten._to_copy, aten.clone, aten.view, aten.neg,
}  # fmt: skip
_IDENTITIES = {"add", "sub"}
"""Operations whose backward pass may have no node: the gradient goes on as it is."""


@functools.cache
def name_of(op: Any) -> str:
    """An operation's name in the tables: as in ATen, without overload, underscores around it and "_forward"."""
    return _ALIASES.get(str(op), str(op)).removeprefix("aten.").strip("_").removesuffix("_forward")


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of the forward pass. nodes: those of the joint graph that it is made of there."""

    seq: int
    op: Any
    name: str
    row: User
    nodes: tuple[fx.Node, ...]

    @functools.cached_property
    def names(self) -> frozenset[str]:
        return frozenset(n.name for n in self.nodes)

    @property
    def first_source(self) -> Any:
        return next((a for a in self.nodes[0].args if isinstance(a, fx.Node)), None)


_NOTHING = Operation(-1, None, "", UNKNOWN_USER, ())


def _row(name: str, node: fx.Node) -> User:
    """The row of an operation: of a power it depends on the exponent, of a division on the divisor."""
    if name == "pow":
        return row_of_power(node.args[1])
    if packet(node) is aten.div:
        divisor = node.args[1]
        if not isinstance(divisor, fx.Node) or (isinstance(value(divisor), Tensor) and not value(divisor).dim()):
            return SCALED
        return UNKNOWN_USER
    return USERS.get(name, UNKNOWN_USER)


def _original(node: fx.Node) -> Any:
    """The operation, without its overload, whose decomposition a node is part of."""
    return without_overload(node.meta.get("original_aten") or node.target)


def _connected(nodes: list[fx.Node], op: Any) -> tuple[fx.Node, ...]:
    """The nodes of the first operation with a number: one without a gradient has that of the one before it."""
    if packet(nodes[0]) is op:
        return (nodes[0], *(u for u in nodes[0].users if u.target is operator.getitem))
    connected, others = {nodes[0]}, set(nodes[1:])
    while more := {n for n in others if not connected.isdisjoint((*n.all_input_nodes, *n.users))}:
        connected |= more
        others -= more
    return tuple(n for n in nodes if n in connected)


def out_of_place(graph: fx.Graph) -> None:
    """Makes operations in place, such as ``silu_``, look like the same out of place.

    torch makes a copy of the input for the backward pass, and mostly gives the forward pass the number of the copy, one
    above that of the backward pass.
    """
    parts: dict[int, list[fx.Node]] = {}
    backward: dict[int, str] = {}
    for node in graph.nodes:
        seq = node.meta.get("seq_nr")
        if node.op == "call_function" and seq is not None:
            if not is_backward(node):
                parts.setdefault(seq, []).append(node)
            elif not is_sum_of_gradients(node):
                backward[seq] = name_of(_original(node)).removesuffix("_backward")
    for seq, name in backward.items():
        copies = (n for n in parts.get(seq + 1, ()) if packet(n) is aten.clone and all(map(is_backward, n.users)))
        forward = [n for n in parts.get(seq, []) + parts.get(seq + 1, []) if name_of(_original(n)) == name]
        for copy in copies:
            if forward and copy.all_input_nodes[0] in forward[0].all_input_nodes:
                copy.replace_all_uses_with(copy.all_input_nodes[0])
                graph.erase_node(copy)
                for node in forward:
                    node.meta["seq_nr"] = seq


class Operations:
    """All operations of a joint graph's forward pass, by sequence number.

    differentiated: the numbers of those through which gradients go. gated: those of the parts of ``x * gate(f(x))``,
    with sigmoid or tanh as gate: GELU by tanh, QuickGELU. Where such a gate is so near its limits that codes of x are
    too coarse for its derivative, the gate's derivative is a small part of the whole one.
    """

    def __init__(self, graph: fx.Graph) -> None:
        parts: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            seq = node.meta.get("seq_nr")
            if node.op == "call_function" and seq is not None and not is_backward(node):
                parts.setdefault(seq, []).append(node)
        self.by_seq: dict[int, Operation] = {}
        for seq, nodes in parts.items():
            # what follows an operation and needs no gradient has its number, too
            op = _original(nodes[0])
            connected = _connected([n for n in nodes if _original(n) is op], op)
            self.by_seq[seq] = Operation(seq, op, name_of(op), _row(name_of(op), connected[0]), connected)
        gradients = [n for n in dependent_on_tangents(graph) if "seq_nr" in n.meta and not is_sum_of_gradients(n)]
        seqs = {n.meta["seq_nr"] for n in gradients}
        for operation in sorted(self.by_seq.values(), key=lambda each: -each.seq):
            if operation.name in _IDENTITIES and any(self._goes_to(seqs, n) for n in operation.nodes):
                seqs.add(operation.seq)
        self.differentiated = frozenset(seqs)
        gates = (each for each in self.by_seq.values() if each.op in (aten.sigmoid, aten.tanh))
        self.gated = frozenset(seq for gate in gates for seq in self._gated_by(gate))

    def _goes_to(self, seqs: set[int], node: fx.Node) -> bool:
        """Whether an operation of these numbers uses a value, also as a view or in another dtype, not detached."""
        for user in node.users:
            if is_backward(user) or _original(user) is aten.detach:
                continue
            if self.of(user).seq in seqs or (
                (packet(user) in VIEWS or packet(user) in COPIES) and self._goes_to(seqs, user)
            ):
                return True
        return False

    def of(self, node: fx.Node) -> Operation:
        """The operation whose forward or backward pass a node is part of.

        Nodes of the forward pass that need no gradient are operations of their own.
        """
        operation = self.by_seq.get(node.meta.get("seq_nr", -1), _NOTHING)
        if is_backward(node) or node.name in operation.names:
            return operation
        op = _original(node)
        return dataclasses.replace(_NOTHING, op=op, name=name_of(op), row=_row(name_of(op), node), nodes=(node,))

    def _gated_by(self, gate: Operation) -> set[int]:
        """The numbers of all operations of ``x * gate(f(x))``, found by going from the gate to a product; else none."""
        between, roots = _roots(gate.nodes[0].args[0])
        x, seqs = gate.nodes[0], {gate.seq}
        while len(users := [u for u in x.users if _goes_on(u)]) == 1:
            user = users[0]
            seqs.add(self.of(user).seq)
            others = [a for a in user.all_input_nodes if a is not x]
            if not others and packet(user) in _AFFINE:
                x = user
            elif packet(user) is aten.mul and len(others) == 1 and _roots(others[0])[1] == roots and len(roots) == 1:
                return seqs | {self.of(n).seq for n in between | _roots(others[0])[0]}
            else:
                break
        return set()


def _goes_on(node: fx.Node) -> bool:
    """Whether a node is of the forward pass, not a copy that it leaves for the backward pass."""
    is_copy = packet(node) in (aten.alias, aten.detach)
    return not is_backward(node) and not (is_copy and all(map(is_backward, node.users)))


def _roots(node: Any) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes between a value and what it is a polynomial of, and the latter."""
    between: set[fx.Node] = set()
    roots: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        x = waiting.pop()
        is_power = (
            packet(x) is aten.pow and isinstance(x.args[1], (int, float)) and x.args[1] in range(1, MOST_EXPONENT)
        )
        if packet(x) in _AFFINE or is_power:
            between.add(x)
            waiting += x.all_input_nodes
        else:
            roots.add(x)
    return between, roots
