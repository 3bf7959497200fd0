"""The operations that a joint graph is made of, and their rows in the tables of :mod:`memkern.saved`.

A joint graph holds the forward and the backward pass of a compiled function, written in primitive operations. torch
gives all nodes of one operation, and those of its backward pass, one sequence number (``seq_nr``), and each node the
operation that was decomposed into it (``original_aten``). So a node in the graph is known by the name that its
operation has in the autograd graph, such as ``SiluBackward0``, for which the tables of the hooks have a row.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ..saved.rules import CODEC_BY_MAKER, RULES
from ..saved.users import (
    AMPLIFIED,
    BOUNDED,
    MANY,
    MEANS,
    MOST_EXPONENT,
    REDUCED,
    SCALED,
    SPARSE,
    UNKNOWN,
    UNKNOWN_USER,
    USERS,
    User,
    of_power,
    passed_on,
    spread,
)

aten, prims = torch.ops.aten, torch.ops.prims

CASTS = {prims.convert_element_type, aten._to_copy, aten.clone, aten.detach, aten.alias}
VIEWS = {
    aten.view, aten._unsafe_view, aten.reshape, aten.permute, aten.transpose, aten.t, aten.expand, aten.unsqueeze,
    aten.squeeze, aten.alias, aten.detach, aten.slice, aten.select, aten.split, aten.split_with_sizes, aten.unbind,
    aten.narrow, prims.broadcast_in_dim, operator.getitem,
}  # fmt: skip
_SAME = {"transformers.grouped_mm_fallback": "aten._grouped_mm"}
"""Operations of libraries: transformers' experts in fp32, whose loop is one operation for torch.compile."""
_IDENTITIES = {"AddBackward0", "SubBackward0"}
"""Their backward pass may have no node: the gradient goes on as it is."""


def packet(node: Any) -> Any:
    """What a node calls, without its overload."""
    return _packet(getattr(node, "target", None))


def _packet(target: Any) -> Any:
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
    return count if isinstance(count, int) else int(count.node.hint or MANY**2)


@functools.cache
def name_of(op: Any) -> str:
    """The name in the autograd graph of an operation's node; "" for one that no table has."""
    words = _SAME.get(str(op), str(op)).removeprefix("aten.").strip("_").removesuffix("_forward").split("_")
    camel = "".join(re.sub(r"(?<=\d)d$", "D", word[:1].upper() + word[1:]) for word in words)
    found = (f"{camel}Backward{i}" for i in range(2))
    return next((name for name in found if name in USERS or name in RULES or name in CODEC_BY_MAKER), "")


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
    """As :func:`memkern.saved.users.user`: of a power it depends on the exponent, of a division on the divisor."""
    if name == "PowBackward0":
        return of_power(node.args[1])
    if packet(node) is aten.div:
        divisor = node.args[1]
        if not isinstance(divisor, fx.Node) or (isinstance(value(divisor), Tensor) and not value(divisor).dim()):
            return SCALED
        return UNKNOWN_USER
    return USERS.get(name, UNKNOWN_USER)


def is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def _original(node: fx.Node) -> Any:
    """The operation, without its overload, that was decomposed into a node among others."""
    return _packet(node.meta.get("original_aten") or node.target)


def _connected(nodes: list[fx.Node], op: Any) -> tuple[fx.Node, ...]:
    """Those of the first of several operations: one that needs no gradient has the number of the one before it."""
    if packet(nodes[0]) is op:
        return (nodes[0], *(u for u in nodes[0].users if u.target is operator.getitem))
    found, left = {nodes[0]}, set(nodes[1:])
    while more := {n for n in left if any(a in found for a in n.all_input_nodes) or any(u in found for u in n.users)}:
        found |= more
        left -= more
    return tuple(n for n in nodes if n in found)


class Operations:
    """All operations of a joint graph's forward pass, by sequence number.

    differentiated: the numbers of those through which gradients go. gated: of the parts of ``x * gate(f(x))``, with
    sigmoid or tanh as gate: GELU by tanh, QuickGELU. Where such a gate is so near its limits that codes of x are too
    coarse for its derivative, that is a small part of the whole one.
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
            own = _connected([n for n in nodes if _original(n) is op], op)
            self.by_seq[seq] = Operation(seq, op, name_of(op), _row(name_of(op), own[0]), own)
        seqs = {n.meta["seq_nr"] for n in tangents(graph) if "seq_nr" in n.meta and not is_sum_of_gradients(n)}
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
                (packet(user) in VIEWS or packet(user) in CASTS) and self._goes_to(seqs, user)
            ):
                return True
        return False

    def of(self, node: fx.Node) -> Operation:
        """The operation whose forward or backward pass a node is part of.

        Nodes of the forward pass that need no gradient are operations of their own.
        """
        found = self.by_seq.get(node.meta.get("seq_nr", -1), _NOTHING)
        if is_backward(node) or node.name in found.names:
            return found
        op = _original(node)
        return dataclasses.replace(_NOTHING, op=op, name=name_of(op), row=_row(name_of(op), node), nodes=(node,))

    def _gated_by(self, gate: Operation) -> set[int]:
        of, roots = _roots(gate.nodes[0].args[0])
        x, found = gate.nodes[0], {gate.seq}
        while len(users := [u for u in x.users if _goes_on(u)]) == 1:
            user = users[0]
            found.add(self.of(user).seq)
            others = [a for a in user.all_input_nodes if a is not x]
            if not others and packet(user) in _AFFINE:
                x = user
            elif packet(user) is aten.mul and len(others) == 1 and _roots(others[0])[1] == roots and len(roots) == 1:
                return found | {self.of(n).seq for n in of | _roots(others[0])[0]}
            else:
                break
        return set()


def _goes_on(node: fx.Node) -> bool:
    """Whether a node is of the forward pass, not a copy that it leaves for the backward pass."""
    is_copy = packet(node) in (aten.alias, aten.detach)
    return not is_backward(node) and not (is_copy and all(map(is_backward, node.users)))


_AFFINE = {
    aten.mul,
    aten.add,
    aten.div,
    prims.convert_element_type,
    aten._to_copy,
    aten.clone,
    aten.view,
    aten.neg,
}


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


# ---- gradients


def tangents(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on a gradient of the outputs. The graph is linear in them."""
    found = {n for n in graph.nodes if n.op == "placeholder" and "tangents" in str(n.target)}
    for node in graph.nodes:
        if node.op != "output" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _is_square(operation: Operation, name: str) -> bool:
    args = operation.nodes[0].args
    if name == "PowBackward0":
        return bool(args[1] == 2)
    return name == "MulBackward0" and args[0] is args[1]


def _is_mean_of_many(operation: Operation, name: str) -> bool:
    return name in MEANS and numel(operation.first_source) >= MANY * numel(operation.nodes[0])


_WORSE = {BOUNDED: 0, REDUCED: 1, UNKNOWN: 2, AMPLIFIED: 3}


@dataclasses.dataclass(frozen=True)
class Gradient:
    """How large a gradient may be (BOUNDED to AMPLIFIED), and of which elements it is (0, SPARSE or DENSE)."""

    state: int
    elements: int


def _worst(of: Iterable[Gradient]) -> Gradient:
    of = list(of)
    return Gradient(max((g.state for g in of), key=_WORSE.__getitem__), max(g.elements for g in of))


def is_sum_of_gradients(node: fx.Node) -> bool:
    """Of a value with several users; its sequence number is that of some other operation."""
    return (
        packet(node) is aten.add
        and is_backward(node)
        and all(isinstance(a, fx.Node) for a in node.args[:2])
        and all(is_backward(a) for a in node.all_input_nodes)
    )


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
