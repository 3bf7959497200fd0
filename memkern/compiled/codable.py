"""Whether a value that a compiled graph saves may stand in codes: what is made of it in the backward pass decides.

The tables are in :mod:`memkern.compiled.rules`. An operation that they do not know gets exactly what it uses.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from typing import Any

from torch import Tensor, fx

from ..quant.layout import FLOATS
from .attention import FORWARD
from .gradients import Gradients
from .nodes import CASTS, CODEC, NOT_AGAIN, NOT_CODED, VIEWS, arguments, aten, is_backward, numel, packet, prims, value
from .operations import Operation, Operations
from .rules import (
    BLOCK_SIZE,
    CODEC_BY_OPERATION,
    COMPUTED_FROM_CODES,
    MIN_NUMEL,
    MOST_EXPONENT,
    POWER,
    PROBABILITY,
    TANH,
    UNSIGNED,
)
from .torch_internals import guard_or_false, must_recompute, statically_known_true

_NORMS = {"native_layer_norm", "native_group_norm", "native_batch_norm"}
_RESULT_CODECS = {
    "softmax": PROBABILITY,
    "safe_softmax": PROBABILITY,
    "sigmoid": PROBABILITY,
    "log_softmax": PROBABILITY,
    "tanh": TANH,
}
"""The codec that an operation's own result must have for its backward pass; relu's may have any."""
_COMPARED = {"relu", "leaky_relu", "elu", "celu"}
"""Compared with 0, which codes do not cross."""
_BY_SIDES = {"hardswish", "hardsigmoid", "hardtanh"}
"""Their derivative jumps at limits, which codes may cross."""
_COMPARISONS = {aten.le, aten.gt, aten.lt, aten.ge, aten.eq, aten.ne}
_COPIES = CASTS | VIEWS - {operator.getitem, aten.expand, prims.broadcast_in_dim}
"""What has the codec of what it is of: casts, copies, views; not larger copies, as of the keys of several heads."""
_SPLITS = {aten.split, aten.split_with_sizes, aten.unbind}
_SAVED_ARGUMENTS = {"output": "out"}  # by the attribute's name, that of the backward pass where it is another


def is_candidate(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in FLOATS and x.dim() > 0


def has_known_blocks(x: Tensor) -> bool:
    """Whether blocks of codes are laid over rows of x alike at all sizes; with a guard for rows of a symbolic length.

    Shorter rows have few elements, and several to a block, whose number would divide by that length.
    """
    row = math.prod(x.shape[1:] if x.shape[0] != 1 else x.shape)
    return isinstance(row, int) or bool(guard_or_false(row >= BLOCK_SIZE))


def _is_decision(x: Any) -> bool:
    """A comparison's result: it was allowed where it was made."""
    return isinstance(x, Tensor) and not x.dtype.is_floating_point


def _before(node: Any, copies: Collection[Any]) -> Any:
    """The node before operations that make copies or views."""
    while packet(node) in copies and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _made(node: fx.Node) -> fx.Node:
    """The node whose operation made a value, before copies and views, of which a split gives several."""
    while packet(base := _before(node, _COPIES)) is operator.getitem and packet(base.args[0]) in _SPLITS:
        node = base.args[0].all_input_nodes[0]
    return base


def codec_of(operations: Operations, node: fx.Node) -> str | None:
    """The name of the codec of a value, by what made it."""
    base = _made(node)
    if NOT_CODED in base.meta:
        return None
    of = operations.of(base)
    if of.seq not in operations.differentiated:  # what needs no gradient is never rounded
        return None
    if packet(base) is aten.exp and is_backward(base) and of.name == "log_softmax":
        return None if _comes_in_16_bits(base) else PROBABILITY
    if is_backward(base) or base.op != "call_function":
        return None
    required = CODEC_BY_OPERATION.get(of.name)
    if required in (PROBABILITY, TANH):
        return required if _is_softmax(base) or packet(base) is of.op else None
    if required not in (POWER, UNSIGNED) or not (of.name in _NORMS or _is_result(operations, base, of)):
        return None
    return required


def _is_softmax(node: fx.Node) -> bool:
    """Whether a node is a softmax, also with zeros for rows that are -inf throughout, as attention's."""
    if packet(node) is aten.where:
        zeros, node = node.args[1:3]  # type: ignore[assignment]
        if packet(zeros) is not aten.full or zeros.args[1] != 0:  # type: ignore[union-attr]
            return False
    return packet(node) is aten.div and packet(node.args[0]) is aten.exp


def _comes_in_16_bits(probabilities: fx.Node) -> bool:
    """Whether logits are there in 16 bits, which take no more than codes and what making codes takes at the peak."""
    node: Any = probabilities
    while packet(node) in (aten.exp, aten.sub) or packet(node) in VIEWS:
        node = node.args[0]
    source = value(node.args[0]) if packet(node) in CASTS else None
    return isinstance(source, Tensor) and source.element_size() < 4


def _is_result(operations: Operations, node: fx.Node, of: Operation) -> bool:
    """Whether a node is what an operation gives, not a step to it."""
    users = [u for u in node.users if u.op == "output" or not is_backward(u)]
    return not users or any(u.op == "output" or operations.of(u).seq != of.seq for u in users)


class Rules:
    """What may be coded in one graph."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients, self.operations = gradients, gradients.operations

    def may_be_coded(self, nodes: list[fx.Node], codec: str, first: fx.Node, counts: Any = None) -> bool:
        """Whether all that is made of some nodes, which are views of the value of the first, bears the errors of codes.

        counts: of which users it is asked; None for all.
        """
        x, norms = value(first), self._norms_of(_made(first))
        waiting, own = list(nodes), set(nodes)  # own: the value itself, as a view, in another dtype, negative
        seen = set(nodes)
        while waiting:
            node = waiting.pop()
            for user in node.users:
                if user.op == "output":
                    if counts is not None and not is_backward(node):
                        continue  # of the forward pass
                    return False
                if counts is not None and not counts[user]:
                    continue
                if self._is_other_norm(user, norms):
                    return False
                is_same = node in own and (
                    packet(user) in VIEWS or packet(user) in CASTS or self._is_negative_result(user)
                )
                if user in self.gradients.nodes:
                    if not self._in_gradient(user, node, codec, node in own):
                        return False
                    continue
                if not is_same and not self._passes(user, node, codec, x, node in own):
                    return False
                if is_same:
                    own.add(user)
                if user not in seen and not _is_decision(value(user)):
                    seen.add(user)
                    waiting.append(user)
        return True

    def _norms_of(self, made: fx.Node) -> set[int]:
        """The numbers of the norms that have normalized a value: of one input several have one normalized value."""
        sharing = {self.operations.of(u).seq for u in made.users if packet(u) is aten.mul and not is_backward(u)}
        return {self.operations.of(made).seq} | (sharing if packet(made) is aten.mul else set())

    def _is_other_norm(self, user: fx.Node, norms: set[int]) -> bool:
        """Whether a node is of a norm's backward pass and codes are not of what this norm has normalized.

        There a multiple of the mean is subtracted from a multiple of x, for which codes of x are too coarse.
        """
        of = self.operations.of(user)
        return of.name in _NORMS and of.seq not in norms and (is_backward(user) or user in self.gradients.nodes)

    def _is_negative_result(self, node: fx.Node) -> bool:
        """Of softmax's backward pass, g p - p sum(g p), which torch computes as fma(-p, sum(g p), g p)."""
        return packet(node) is aten.neg and is_backward(node) and self.operations.of(node).name in _RESULT_CODECS

    def _fits(self, of: Operation, codec: str, own: bool) -> bool:
        """Whether the codec is the one for an operation that uses its own result."""
        required = _RESULT_CODECS.get(of.name)
        if required is None or (of.seq in self.operations.gated and not own):
            return True
        return own and codec == required

    def _in_gradient(self, user: fx.Node, node: fx.Node, codec: str, own: bool) -> bool:
        """Whether a node of the backward pass that takes a gradient may take an operand from codes."""
        of = self.operations.of(user)
        if of.name in _BY_SIDES or not self._fits(of, codec, own):
            return False
        if of.row.kind == "product":
            return self._is_coded_argument(user, node, of)
        if of.row.kind != "smooth" or not of.row.coded:
            return False
        if of.name == "log_softmax":
            return self.gradients.is_sparse(user) and self.gradients.bears_codes(user)
        return self.gradients.bears_codes(user)

    @staticmethod
    def _is_coded_argument(user: fx.Node, node: fx.Node, of: Operation) -> bool:
        given = arguments(user)
        if of.name not in FORWARD or not given or packet(user) in VIEWS:
            return True
        if given.get("dropout_p"):
            return False
        coded = {_SAVED_ARGUMENTS.get(name, name) for name in of.row.coded}
        return all(name in coded for name, arg in given.items() if arg is node)

    def _passes(self, user: fx.Node, node: fx.Node, codec: str, x: Tensor, own: bool) -> bool:
        """Whether a value computed from codes is as good as they are.

        The first that holds decides: what the node is part of (a checkpoint, a gated unit, the backward pass), views
        and casts, the steps of a norm, the node's own operator; last, whether its operation is in COMPUTED_FROM_CODES.
        """
        if must_recompute(user):  # of a checkpoint: another function of what it begins with
            return False
        of, name = self.operations.of(user), packet(user)
        if of.seq in self.operations.gated and name not in _COMPARISONS:
            return True
        if is_backward(user):
            return self._passes_in_backward(user, of, codec, own)
        if name in VIEWS or name in CASTS:
            return True
        if of.name in _NORMS:
            return name is not aten.sub
        if name is aten.mul:
            return self._passes_product(user, node, x)
        if name is aten.pow:
            return isinstance(user.args[1], (int, float)) and user.args[1] in range(1, MOST_EXPONENT + 1)
        if name is aten.div and of.op is aten.div:
            return user.args[0] is node and user.args[1] is not node
        if name is aten.add and of.op is aten.add:
            return all(isinstance(a, fx.Node) for a in user.args[:2])
        if name in (aten.index, aten.cat):
            return name is aten.cat or user.args[0] is node
        return of.name in COMPUTED_FROM_CODES

    def _passes_in_backward(self, user: fx.Node, of: Operation, codec: str, own: bool) -> bool:
        if of.name in _BY_SIDES:
            return False
        if packet(user) in _COMPARISONS:
            return of.name in _COMPARED and bool(user.args[1] == 0)
        if packet(user) in VIEWS or packet(user) in CASTS:
            return True
        return of.row.kind in ("product", "smooth") and bool(of.row.coded) and self._fits(of, codec, own)

    @staticmethod
    def _passes_product(user: fx.Node, node: fx.Node, x: Tensor) -> bool:
        """Not of rows that a norm scales each by its own deviation, if one block of codes holds values of several."""
        others = [value(a) for a in user.all_input_nodes if a is not node]
        scales = [y for y in others if isinstance(y, Tensor) and y.dim() and y.shape[-1] == 1 and y.numel() > 1]
        return not scales or bool(statically_known_true(x.shape[-1] % BLOCK_SIZE == 0))


def mark(graph: fx.Graph, rules: Rules, is_recomputable: Any) -> None:
    """Notes in ``meta[CODEC]`` the codec of each value that could be saved in codes, before torch chooses.

    And in ``meta[NOT_AGAIN]`` the differences x - mean of norms whose normalized values may be coded: codes of x are
    too coarse for a difference.
    """
    differences = [n for n in graph.nodes if _is_difference(rules, n)]
    found = _codable(graph, rules, is_recomputable, {*differences})
    saved = [n for n in differences if any(u in found and not is_backward(u) for u in n.users)]
    if len(saved) < len(differences):
        found = _codable(graph, rules, is_recomputable, {*saved})
    for node, codec in found.items():
        node.meta[CODEC] = codec
    for node in saved:
        node.meta[NOT_AGAIN] = True


def _is_difference(rules: Rules, node: fx.Node) -> bool:
    return packet(node) is aten.sub and not is_backward(node) and rules.operations.of(node).name in _NORMS


def _codable(graph: fx.Graph, rules: Rules, is_recomputable: Any, saved: set[fx.Node]) -> dict[fx.Node, str]:
    """The codecs of values. saved: what is not computed again, or not from what may be in codes."""
    counts: dict[fx.Node, bool] = {}  # of the forward pass: what the backward pass may compute again to get on
    for node in reversed(graph.nodes):
        is_gradient = node in rules.gradients.nodes
        sizes = sum(numel(a) for a in node.all_input_nodes)
        again = node.op == "call_function" and is_recomputable(node) and 4 * numel(node) >= sizes and node not in saved
        counts[node] = is_gradient or (again and any(counts.get(u, False) for u in node.users))
    found = {}
    for node in graph.nodes:
        if node.op != "call_function" or node in rules.gradients.nodes or numel(node) < MIN_NUMEL:
            continue
        x = value(node)
        codec = codec_of(rules.operations, node) if is_candidate(x) else None
        if codec is not None and rules.may_be_coded([node], codec, node, counts) and has_known_blocks(x):
            found[node] = codec
    return found


def share_normalized(graph: fx.Graph, operations: Operations) -> None:
    """Has a norm's backward pass take (x - mean) / deviation of the forward pass, of which codes serve both.

    On CPUs torch rounds mean and deviation to 16 bits for the backward pass, and in other layouts it copies x.
    """
    found: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if packet(node) is not aten.mul or operations.of(node).name not in _NORMS:
            continue
        key = (value(node).dtype, _factors(node))
        if not is_backward(node):
            found[key] = node
        elif key in found:
            node.replace_all_uses_with(found[key])
    graph.eliminate_dead_code()


def _factors(product: fx.Node) -> tuple[Any, ...]:
    """Of what a product is made, without casts and copies."""
    of = [_before(a, CASTS) for a in product.args]
    return tuple(tuple(_before(b, CASTS) for b in a.args) if packet(a) is aten.sub else a for a in of)
