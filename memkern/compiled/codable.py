"""Decides whether a value that a compiled graph saves may be in 8-bit codes, by its uses in the backward pass.

The tables are in :mod:`memkern.compiled.rules`. An operation that they do not know gets exactly what it uses.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from torch import Tensor, fx

from ..quant.layout import FLOATS
from .attention import FORWARD
from .gradients import REDUCED, Gradients
from .nodes import (
    CODEC,
    COPIES,
    NOT_AGAIN,
    NOT_CODED,
    VIEWS,
    arguments,
    aten,
    is_backward,
    number,
    numel,
    packet,
    prims,
    value,
)
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
_WITH_STATISTICS = {*_NORMS, "fused_rms_norm", "cudnn_batch_norm"}
"""Operations that compute means and deviations, each for many elements."""
_RESULT_CODECS = {**dict.fromkeys(("softmax", "safe_softmax", "sigmoid", "log_softmax"), PROBABILITY), "tanh": TANH}
"""The codec that an operation's own result must have for its backward pass; relu's may have any."""
_COMPARED = {"relu", "leaky_relu", "elu", "celu"}
"""Operations whose backward pass compares with 0, which codes do not cross."""
_WITH_JUMPS = {"hardswish", "hardsigmoid", "hardtanh"}
"""Operations whose derivative jumps at limits, which codes may cross."""
_GATES = {"sigmoid", "hardsigmoid", "tanh", "softmax"}
"""Operations whose results are at most 1."""
_COMPARISONS = {aten.le, aten.gt, aten.lt, aten.ge, aten.eq, aten.ne}
_SAME_CODEC = COPIES | VIEWS - {operator.getitem, aten.expand, prims.broadcast_in_dim}
"""Operations whose result has the codec of their input: casts, copies and views, but not copies that are larger, as of
keys that several heads share."""
_REPEATS = {aten.repeat, aten.index, aten._unsafe_index}
"""Operations whose result has elements of their input several times."""
_SPLITS = {aten.split, aten.split_with_sizes, aten.unbind}
_SAVED_ARGUMENTS = {"output": "out"}  # by name in rules.USERS: the name in attention's backward op


def is_candidate(x: Any) -> bool:
    """Whether a value is a tensor of a dtype that has codes."""
    return isinstance(x, Tensor) and x.dtype in FLOATS and x.dim() > 0


def has_known_blocks(x: Tensor) -> bool:
    """Whether rows of x are cut into blocks in the same way at all sizes; with a guard for rows of a symbolic length.

    Several shorter rows share a block, and the number of blocks would have a division by the symbolic length.
    """
    row = math.prod(x.shape[1:] if x.shape[0] != 1 else x.shape)
    return isinstance(row, int) or bool(guard_or_false(row >= BLOCK_SIZE))


def _is_decision(x: Any) -> bool:
    """Whether a value is a comparison's result. Whether the comparison may read codes was decided at the comparison."""
    return isinstance(x, Tensor) and not x.dtype.is_floating_point


def _before_copies(node: Any, copies: Collection[Any]) -> Any:
    """The node whose value a node has, found by going back through ``copies``: operations that make copies or views."""
    while packet(node) in copies and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _producer(node: fx.Node) -> fx.Node:
    """The node that computed a value, before copies, views and splits."""
    base = _before_copies(node, _SAME_CODEC)
    while packet(base) is operator.getitem and packet(base.args[0]) in _SPLITS:
        base = _before_copies(base.args[0].all_input_nodes[0], _SAME_CODEC)  # of the tensor that was split
    return base


def codec_of(operations: Operations, node: fx.Node) -> str | None:
    """The name of the codec in which a value may be saved, by the operation that computed it; None for no codec."""
    base = _producer(node)
    if NOT_CODED in base.meta:
        return None
    operation = operations.of(base)
    if operation.seq not in operations.differentiated:  # what needs no gradient is never rounded
        return None
    # log_softmax saves its result; its backward pass computes the probabilities from it.
    if packet(base) is aten.exp and is_backward(base) and operation.name == "log_softmax":
        return None if _comes_in_16_bits(base) else PROBABILITY
    if is_backward(base) or base.op != "call_function" or _is_statistic(base, operation):
        return None
    required = CODEC_BY_OPERATION.get(operation.name)
    if required in (PROBABILITY, TANH):
        return required if _is_softmax(base) or packet(base) is operation.op else None
    if required not in (POWER, UNSIGNED) or not (operation.name in _NORMS or _is_result(operations, base, operation)):
        return None
    return required


def _is_statistic(node: fx.Node, operation: Operation) -> bool:
    """Whether a node is a norm's mean or deviation: a value with fewer elements than what is normalized.

    An error of a statistic is one of all elements that share it. A mean may be many deviations large, and deviations
    that share a block of codes may be far from each other. An exact statistic takes 4 bytes in fp32, where codes of the
    elements that share it take 1 byte for each: 1.6 % more for a layer norm over 256 elements.
    """
    return operation.name in _WITH_STATISTICS and numel(node) < max(map(numel, operation.nodes))


def _is_softmax(node: fx.Node) -> bool:
    """Whether a node is a softmax, also with zeros for rows that are -inf throughout, as attention's."""
    if packet(node) is aten.where:
        zeros, node = node.args[1:3]  # type: ignore[assignment]
        if packet(zeros) is not aten.full or zeros.args[1] != 0:  # type: ignore[union-attr]
            return False
    return packet(node) is aten.div and packet(node.args[0]) is aten.exp


def _comes_in_16_bits(probabilities: fx.Node) -> bool:
    """Whether probabilities are of 16-bit logits, which take no more memory at the peak than codes and the encoding."""
    node: Any = probabilities
    while packet(node) in (aten.exp, aten.sub) or packet(node) in VIEWS:
        node = node.args[0]
    source = value(node.args[0]) if packet(node) in COPIES else None
    return isinstance(source, Tensor) and source.element_size() < 4


def _is_result(operations: Operations, node: fx.Node, op: Operation) -> bool:
    """Whether a node has an operation's result, not a value on the way to it: the output, another operation or only the
    backward pass uses the node, or a view of it has the result, as in the decomposition of stack."""
    users = [u for u in node.users if u.op == "output" or not is_backward(u)]
    return not users or any(
        u.op == "output" or operations.of(u).seq != op.seq or (packet(u) in VIEWS and _is_result(operations, u, op))
        for u in users
    )


class _Use(NamedTuple):
    """A node that uses a value in codes, or what is computed from one.

    operand: what the node uses. operation: the operation that the node is part of.
    is_value: whether the operand is the value in codes itself, also as a view, in another dtype or negative.
    in_order: whether each of the operand's rows is a run of the value's memory, of which a block of codes is a part.
    codec, producer: the codec of the value in codes, and the node that computed the value.
    """

    node: fx.Node
    operand: fx.Node
    operation: Operation
    is_value: bool
    in_order: bool
    codec: str
    producer: fx.Node

    @property
    def called(self) -> Any:
        return packet(self.node)

    @property
    def has_whole_rows(self) -> bool:
        """Whether no block of codes has values of several of the operand's rows."""
        return self.in_order and bool(statically_known_true(value(self.operand).shape[-1] % BLOCK_SIZE == 0))

    @property
    def is_copy(self) -> bool:
        return self.called in VIEWS or self.called in COPIES


class UseChecker:
    """Which values of a graph may be coded: each use of a value in the backward pass must bear the errors of codes."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients, self.operations = gradients, gradients.operations

    def may_be_coded(self, nodes: list[fx.Node], codec: str, first: fx.Node, in_backward: Any = None) -> bool:
        """Whether all that is computed from ``nodes``, which are views of ``first``'s value, bears the errors of codes.

        in_backward: by node of a joint graph, whether the backward pass may compute it; None for a backward graph.
        """
        return self.refusal(nodes, codec, first, in_backward) is None

    def refusal(
        self, nodes: list[fx.Node], codec: str, first: fx.Node, in_backward: Any = None
    ) -> tuple[str, fx.Node] | None:
        """Kind (of USE_KINDS) and node of the first use that does not bear the errors of codes; None if all do."""
        producer = _producer(first)
        waiting, same_value = list(nodes), set(nodes)
        visited = set(nodes)
        reordered = {node for node in nodes if not (_has_rows_in_memory(first) and _has_rows_in_memory(node))}
        is_joint = in_backward is not None
        while waiting:
            operand = waiting.pop()
            for node in operand.users:
                if node.op == "output":
                    if is_joint and not is_backward(operand):
                        continue  # the forward pass returns it, and has the exact values
                    return "output", node
                if is_joint and not in_backward[node]:
                    continue
                is_value, in_order = operand in same_value, operand not in reordered
                use = _Use(node, operand, self.operations.of(node), is_value, in_order, codec, producer)
                kind, bears = next((kind, bears) for kind, (matches, bears) in USE_KINDS.items() if matches(self, use))
                if not bears(self, use):
                    return kind, node
                if node in self.gradients.nodes:
                    continue  # the gradient bears the errors here, and so does all that is computed from it
                if kind == SAME:
                    same_value.add(node)
                if node not in reordered and not (in_order and _has_rows_in_memory(node)):
                    reordered.add(node)
                    visited.discard(node)  # its uses were looked at with rows in order
                if node not in visited and not _is_decision(value(node)):
                    visited.add(node)
                    waiting.append(node)
        return None

    def is_of_another_norm(self, use: _Use) -> bool:
        """Whether a node is of the backward pass of a norm whose normalized value is not the value in codes.

        Such a backward pass subtracts a multiple of the mean from a multiple of x, and codes of x are too coarse for
        the difference. Several norms of one input share one normalized value.
        """
        operation = use.operation
        if operation.name not in _NORMS or not (is_backward(use.node) or use.node in self.gradients.nodes):
            return False
        sharing = [u for u in use.producer.users if packet(u) is aten.mul and not is_backward(u)]
        normalized = [use.producer, *(sharing if packet(use.producer) is aten.mul else ())]
        return operation.seq not in {self.operations.of(n).seq for n in normalized}

    def is_same(self, use: _Use) -> bool:
        """Whether a node has the value in codes: as a view, in another dtype, or negative, as torch computes softmax's
        backward pass, g p - p sum(g p), as fma(-p, sum(g p), g p)."""
        is_negative = use.called is aten.neg and is_backward(use.node) and use.operation.name in _RESULT_CODECS
        return use.is_value and (use.is_copy or is_negative)

    def is_gated(self, use: _Use) -> bool:
        """Whether a node is of ``x * gate(f(x))``, whose derivative bears codes of x (:class:`Operations`)."""
        return use.operation.seq in self.operations.gated and use.called not in _COMPARISONS

    def is_deviation(self, node: fx.Node) -> bool:
        """Whether a node may have the numbers by which a norm scales its rows: computed, by no gate, and either one for
        each row or the result of a root, a division or an unknown operation."""
        x, source = value(node), _before_copies(node, COPIES | VIEWS | _REPEATS)
        if not isinstance(x, Tensor) or source.op != "call_function" or numel(node) == 1:
            return False
        operation = self.operations.of(source)
        return operation.name not in _GATES and (_is_constant_in_rows(x) or operation.row.kind == "singular")

    def fits(self, use: _Use) -> bool:
        """Whether the codec is the one for an operation that uses its own result."""
        required = _RESULT_CODECS.get(use.operation.name)
        if required is None or (use.operation.seq in self.operations.gated and not use.is_value):
            return True
        return use.is_value and use.codec == required

    def bears_in_gradient(self, use: _Use) -> bool:
        """Whether a node that takes a gradient may take an operand from codes."""
        operation = use.operation
        if operation.name in _WITH_JUMPS or not self.fits(use):
            return False
        if operation.row.kind == "singular" or not operation.row.coded:
            return False
        if operation.row.kind != "smooth":
            return _is_coded_argument(use)
        if operation.name == "log_softmax" and not self.has_one_class(use):
            return False
        return self.gradients.bears_codes(use.node) and _bears_factors(use, self.factors_of_gradient(use))

    def has_one_class(self, use: _Use) -> bool:
        """Whether probabilities serve one loss of one class in each row: of several, the gradients may cancel."""
        uses = {self.operations.of(u).seq for u in use.operand.users if u in self.gradients.nodes}
        return len(uses) == 1 and self.gradients.is_sparse(use.node)

    def factors_of_gradient(self, use: _Use) -> list[fx.Node]:
        """The numbers by which a norm scales the gradient of an operation: the statistics of a norm of its result, or,
        where a norm is written by hand, factors of the value and means of its squares."""
        forward = use.operation.nodes[0]
        if self.gradients.at_output[use.node].state == REDUCED:
            return [u for u in forward.users if self.operations.of(u).name == "mean" and numel(u) > 1]
        if packet(forward) is not aten.mul:
            return []
        norms = [op for u in _uses_of_views(forward) if (op := self.operations.of(u)).name in _NORMS]
        statistics = [n for op in norms for n in op.nodes if _is_statistic(n, op) and isinstance(value(n), Tensor)]
        return self.deviations(forward) + statistics

    def deviations(self, node: fx.Node) -> list[fx.Node]:
        """A node's operands that may be deviations."""
        return [a for a in node.all_input_nodes if self.is_deviation(a)]

    def bears_in_backward(self, use: _Use) -> bool:
        """Whether a node of the backward pass that takes no gradient may take an operand from codes."""
        return use.operation.row.kind in ("product", "smooth") and bool(use.operation.row.coded) and self.fits(use)


def _is_coded_argument(use: _Use) -> bool:
    """False for what attention's backward pass does not take in codes: not all of its arguments are coded."""
    given = arguments(use.node)
    if use.operation.name not in FORWARD or not given or use.called in VIEWS:
        return True
    if given.get("dropout_p"):
        return False
    coded = {_SAVED_ARGUMENTS.get(name, name) for name in use.operation.row.coded}
    return all(name in coded for name, arg in given.items() if arg is use.operand)


def _uses_of_views(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that use a value, also as a view or in another dtype."""
    for user in node.users:
        yield user
        if packet(user) in VIEWS or packet(user) in COPIES:
            yield from _uses_of_views(user)


def _has_rows_in_memory(node: fx.Node) -> bool:
    """Whether a tensor's rows, which its last dimension numbers the elements of, are runs of memory."""
    x = value(node)
    return isinstance(x, Tensor) and x.dim() > 0 and bool(statically_known_true(x.stride(-1) == 1))


def _is_constant_in_rows(x: Tensor) -> bool:
    """Whether a factor has one number for each row of a product's other factor."""
    return x.dim() > 0 and (x.shape[-1] == 1 or x.stride(-1) == 0)


def _row_count(node: fx.Node) -> int:
    """The number of a tensor's rows."""
    return numel(node) // number(value(node).shape[-1])


def _bears_factors(use: _Use, factors: list[fx.Node]) -> bool:
    """False where a norm scales values of one block of codes by several numbers."""
    return not factors or (
        use.has_whole_rows
        and all(_is_constant_in_rows(value(a)) and _row_count(a) <= _row_count(use.operand) for a in factors)
    )


def _bears_product(checker: UseChecker, use: _Use) -> bool:
    return _bears_factors(use, [a for a in checker.deviations(use.node) if a is not use.operand])


def _bears_division(checker: UseChecker, use: _Use) -> bool:
    numerator, divisor = use.node.args
    return numerator is use.operand and divisor is not use.operand and _bears_product(checker, use)


def _bears_sum(_: UseChecker, use: _Use) -> bool:
    """False where a number, or one for many elements, may cancel the mean of the value in codes."""
    summands = use.node.args[:2]
    return all(isinstance(a, fx.Node) and not (use.is_value and numel(a) < numel(use.operand)) for a in summands)


def _bears_power(_: UseChecker, use: _Use) -> bool:
    exponent = use.node.args[1]
    return isinstance(exponent, (int, float)) and exponent in range(1, MOST_EXPONENT + 1)


def _yes(_: UseChecker, use: _Use) -> bool:
    return True


def _no(_: UseChecker, use: _Use) -> bool:
    return False


SAME = "the value itself"
_Test = Callable[[UseChecker, _Use], bool]
USE_KINDS: dict[str, tuple[_Test, _Test]] = {
    "another norm's backward pass": (UseChecker.is_of_another_norm, _no),
    "a gradient": (lambda checker, use: use.node in checker.gradients.nodes, UseChecker.bears_in_gradient),
    SAME: (UseChecker.is_same, _yes),
    # the rest are uses in what is computed again, by operations of the backward or of the forward pass
    "a checkpoint": (lambda _, use: must_recompute(use.node), _no),  # another function of what it begins with
    "a gated unit": (UseChecker.is_gated, _yes),
    "a derivative that jumps": (lambda _, use: is_backward(use.node) and use.operation.name in _WITH_JUMPS, _no),
    "a comparison": (
        lambda _, use: is_backward(use.node) and use.called in _COMPARISONS,
        lambda _, use: use.operation.name in _COMPARED and bool(use.node.args[1] == 0),
    ),
    "a view or cast": (lambda _, use: use.is_copy, _yes),
    "a backward pass": (lambda _, use: is_backward(use.node), UseChecker.bears_in_backward),
    "a norm": (lambda _, use: use.operation.name in _NORMS, lambda _, use: use.called is not aten.sub),
    "mul": (lambda _, use: use.called is aten.mul, _bears_product),
    "pow": (lambda _, use: use.called is aten.pow, _bears_power),
    "div": (
        lambda _, use: use.called is aten.div and use.operation.op is aten.div,
        _bears_division,
    ),
    "add": (
        lambda _, use: use.called is aten.add and use.operation.op is aten.add,
        _bears_sum,
    ),
    "index": (
        lambda _, use: use.called in (aten.index, aten._unsafe_index),
        lambda _, use: use.node.args[0] is use.operand,
    ),
    "cat": (lambda _, use: use.called is aten.cat, _yes),
    "any other": (_yes, lambda _, use: use.operation.name in COMPUTED_FROM_CODES),
}
"""By kind: which uses are of the kind, and whether they bear the errors of codes. A use is of the first kind that it
fits."""


def mark(graph: fx.Graph, checker: UseChecker, is_recomputable: Any) -> None:
    """Notes in ``meta[CODEC]`` the codec of each value that could be saved in codes, before torch chooses.

    Marks with ``meta[NOT_AGAIN]`` the differences x - mean of norms whose normalized values may be coded: codes of x
    are too coarse for a difference.
    """
    differences = [n for n in graph.nodes if _is_difference(checker, n)]
    codec_by_node = _codable(graph, checker, is_recomputable, {*differences})
    saved = [n for n in differences if any(u in codec_by_node and not is_backward(u) for u in n.users)]
    if len(saved) < len(differences):
        codec_by_node = _codable(graph, checker, is_recomputable, {*saved})
    for node, codec in codec_by_node.items():
        node.meta[CODEC] = codec
    for node in saved:
        node.meta[NOT_AGAIN] = True


def _is_difference(checker: UseChecker, node: fx.Node) -> bool:
    return packet(node) is aten.sub and not is_backward(node) and checker.operations.of(node).name in _NORMS


def _codable(graph: fx.Graph, checker: UseChecker, is_recomputable: Any, saved: set[fx.Node]) -> dict[fx.Node, str]:
    """The codec of each value that may be coded. saved: nodes that are not computed again from codes."""
    in_backward: dict[fx.Node, bool] = {}  # gradients, and what the backward pass may compute again
    for node in reversed(graph.nodes):
        is_gradient = node in checker.gradients.nodes
        sizes = sum(numel(a) for a in node.all_input_nodes)
        again = node.op == "call_function" and is_recomputable(node) and 4 * numel(node) >= sizes and node not in saved
        in_backward[node] = is_gradient or (again and any(in_backward.get(u, False) for u in node.users))
    codec_by_node = {}
    for node in graph.nodes:
        if node.op != "call_function" or node in checker.gradients.nodes or numel(node) < MIN_NUMEL:
            continue
        x = value(node)
        codec = codec_of(checker.operations, node) if is_candidate(x) else None
        if codec is not None and checker.may_be_coded([node], codec, node, in_backward) and has_known_blocks(x):
            codec_by_node[node] = codec
    return codec_by_node


def share_normalized(graph: fx.Graph, operations: Operations) -> None:
    """Makes a norm's backward pass take the forward pass's (x - mean) / deviation, so that its codes serve both.

    On CPUs torch rounds mean and deviation to 16 bits for the backward pass, and in other layouts torch copies x.
    """
    normalized: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if packet(node) is not aten.mul or operations.of(node).name not in _NORMS:
            continue
        key = (value(node).dtype, _factors(node))
        if not is_backward(node):
            normalized[key] = node
        elif key in normalized:
            node.replace_all_uses_with(normalized[key])
    graph.eliminate_dead_code()


def _factors(product: fx.Node) -> tuple[Any, ...]:
    """The factors of a product before casts and copies; for a difference, what is subtracted from what."""
    operands = [_before_copies(a, COPIES) for a in product.args]
    return tuple(tuple(_before_copies(b, COPIES) for b in a.args) if packet(a) is aten.sub else a for a in operands)
