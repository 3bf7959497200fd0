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
"""Operations whose backward pass may have no node, as the gradient at their inputs is that at their output."""


@functools.cache
def name_of(op: Any) -> str:
    """An operation's name in the tables: as in ATen, without overload, underscores around it and "_forward"."""
    return _ALIASES.get(str(op), str(op)).removeprefix("aten.").strip("_").removesuffix("_forward")


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of the forward pass. nodes: the nodes into which torch decomposed it in the forward pass."""

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
    """The row of an operation. The row of a power depends on its exponent, that of a division on its divisor."""
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
    """The nodes of the first call of ``op`` among ``nodes``, which are of several calls of one sequence number: torch
    gives a call without a gradient the number of the call before it."""
    if packet(nodes[0]) is op:  # a call that is not decomposed
        return (nodes[0], *(u for u in nodes[0].users if u.target is operator.getitem))
    connected, others = {nodes[0]}, set(nodes[1:])
    while more := {n for n in others if not connected.isdisjoint((*n.all_input_nodes, *n.users))}:
        connected |= more
        others -= more
    return tuple(n for n in nodes if n in connected)


def out_of_place(graph: fx.Graph) -> None:
    """Makes operations in place, such as ``silu_``, look like the same out of place.

    Autograd copies the input of such an operation before the input is overwritten, and the backward pass reads the
    copy. The copy's sequence number is 1 above that of the backward pass, and most often the forward nodes have the
    copy's. Afterwards there is no copy, the backward pass reads the input, and all nodes have one number.
    """
    forward_of: dict[int, list[fx.Node]] = {}  # by sequence number
    backward: dict[int, str] = {}  # by sequence number, the name of the operation whose backward pass has it
    for node in graph.nodes:
        seq = node.meta.get("seq_nr")
        if node.op == "call_function" and seq is not None:
            if not is_backward(node):
                forward_of.setdefault(seq, []).append(node)
            elif not is_sum_of_gradients(node):
                backward[seq] = name_of(_original(node)).removesuffix("_backward")
    for seq, name in backward.items():
        own, next_ones = forward_of.get(seq, []), forward_of.get(seq + 1, [])
        copies = (n for n in next_ones if packet(n) is aten.clone and all(map(is_backward, n.users)))
        forward = [n for n in own + next_ones if name_of(_original(n)) == name]
        for copy in copies:
            (x,) = copy.all_input_nodes
            if forward and x in forward[0].all_input_nodes:
                copy.replace_all_uses_with(x)
                graph.erase_node(copy)
                for node in forward:
                    node.meta["seq_nr"] = seq


class Operations:
    """All operations of a joint graph's forward pass, by sequence number.

    differentiated: the numbers of the operations through which gradients go.
    gated: the numbers of all operations in products ``x * gate(f(x))`` with sigmoid or tanh as the gate and a
    polynomial f, such as QuickGELU and the GELU by tanh. There the gate's derivative, too, is computed from codes of x:
    where they are too coarse for it, near the gate's limits, it is a small part of the product's derivative.
    """

    def __init__(self, graph: fx.Graph) -> None:
        parts: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            seq = node.meta.get("seq_nr")
            if node.op == "call_function" and seq is not None and not is_backward(node):
                parts.setdefault(seq, []).append(node)
        self.by_seq: dict[int, Operation] = {}
        for seq, nodes in parts.items():
            # The first node's operation has the number. Operations after it that need no gradient have the number, too.
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
        """The numbers of all operations of ``x * gate(f(x))``; none where the gate is no part of such a product."""
        in_f, roots = _roots(gate.nodes[0].args[0])
        if len(roots) != 1:  # f depends on more than one value x
            return set()
        # From the gate on along single users: affine functions, such as the 1 + tanh of GELU, and then the product.
        node, seqs = gate.nodes[0], {gate.seq}
        while len(users := [u for u in node.users if _goes_on(u)]) == 1:
            user = users[0]
            seqs.add(self.of(user).seq)
            others = [a for a in user.all_input_nodes if a is not node]
            if not others and packet(user) in _AFFINE:
                node = user
                continue
            if packet(user) is not aten.mul or len(others) != 1:
                break
            in_factor, roots_of_factor = _roots(others[0])  # the factor x may be cast or scaled, as x / 2
            return seqs | {self.of(n).seq for n in in_f | in_factor} if roots_of_factor == roots else set()
        return set()


def _goes_on(node: fx.Node) -> bool:
    """Whether a node is of the forward pass, not a copy that it leaves for the backward pass."""
    is_copy = packet(node) in (aten.alias, aten.detach)
    return not is_backward(node) and not (is_copy and all(map(is_backward, node.users)))


def _roots(node: Any) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes that compute a value, as a polynomial, from other values; and these other values, the roots."""
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
