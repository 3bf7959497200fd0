"""Derives the value of an edge from values that are stored."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .edge import Edge
from .leaves import leaves
from .needs import Need
from .peek import saved_by
from .rules import MOST_FUNCTIONS, RULES, Kind, Rule
from .saved_value import Computed, Leaf, Value, finer, is_float8, register, registered
from .users import is_leaf, operation

_MOST_STEPS = 40
"""Rules one after another, views and copies among them, by which a value is found and computed: each is a recursion."""


def derive(edge: Edge, dtype: torch.dtype, need: Need, reach: Kind, beside_codes: bool) -> Value | None:
    """The value of an edge, precise to ``dtype`` and as ``need`` says, from what is stored; None if nothing gives it.

    reach: views alone, also copies, or also functions. beside_codes: whether other values are stored in codes.
    """
    return _Derivation(need, reach, beside_codes).value(edge, dtype)


class _Derivation:
    """One search, with what it has tried in vain."""

    def __init__(self, need: Need, reach: Kind, beside_codes: bool) -> None:
        self.need, self.reach, self.beside_codes = need, reach, beside_codes
        self.failed: dict[tuple[Any, int, torch.dtype | None], int] = {}  # with how many functions left

    def value(
        self, edge: Edge, dtype: torch.dtype | None, steps: int = _MOST_STEPS, functions: int = MOST_FUNCTIONS
    ) -> Value | None:
        """steps: the rules that are left to try one after another; functions: those that compute something.

        dtype: None for the edge's own.
        """
        value = registered(edge)
        only_views = self.reach == Kind.VIEW
        if value is not None and self.need.is_met_by(value, dtype) and not (only_views and isinstance(value, Computed)):
            if self.need.exact:
                value.stay_exact()
            return value
        rule = RULES.get(operation(edge.node))
        if rule is None or steps == 0 or functions < rule.cost or not self._allows(rule):
            return None
        key = edge.node, edge.nr, dtype
        if functions <= self.failed.get(key, -1):
            return None
        if rule.kind == Kind.VIEW:
            value = self._seen_through(edge, dtype, steps, functions)
        else:
            value = self._applied(rule, edge, dtype, steps, functions - rule.cost)
        if value is None:
            self.failed[key] = functions
        return value

    def _allows(self, rule: Rule) -> bool:
        return (
            rule.kind <= self.reach
            and not (rule.uncoded and self.beside_codes)
            and (rule.exactness == "bits" or self.need.rounded)
        )

    def _seen_through(self, edge: Edge, dtype: torch.dtype | None, steps: int, functions: int) -> Value | None:
        """A chain of views, as one function of the tensor that they are views of, whose dtype and device they have."""
        views = [edge]
        value: Value | None
        while True:
            node, nr = views[-1].node.next_functions[0]
            if node is None:
                return None
            if is_leaf(node):
                value = _unchanged(node.variable, views[-1].node)
                break
            source = Edge(node, nr)
            above = RULES.get(operation(node))
            if above is None or above.kind != Kind.VIEW or len(views) == steps or registered(source) is not None:
                value = self.value(source, dtype, steps - len(views), functions)
                break
            views.append(source)
        if value is None or (function := _composition(views)) is None:
            return None
        precision = value.dtype if finer(value.precision, value.dtype) else value.precision
        seen = Computed(function, (value,), value.dtype, precision, 0)
        seen.rounded, seen.clipped = value.rounded, value.clipped
        return _registered(edge, seen)

    def _applied(self, rule: Rule, edge: Edge, dtype: torch.dtype | None, steps: int, functions: int) -> Value | None:
        """The rule's function of the operation's inputs."""
        sources = edge.inputs()
        # Before the way up of the others is tried: of a sum of many layers that would be the whole model.
        if len(sources) > 1 and any(map(_is_lost, sources)):
            return None
        if (function := _function(rule, edge)) is None:
            return None
        values: list[Value] = []
        for i, source in enumerate(sources):
            if source is None or is_leaf(source.node):
                found = self._without_graph(rule, edge.node, source, i)
            else:
                value = self.value(source, _needed(rule, edge, source, dtype), steps - 1, functions)
                found = None if value is None else [value]
            if found is None:
                return None
            values += found
            if i == 0 and rule.extra:
                extra = [saved_by(edge.node, attribute) for attribute in rule.extra]
                if not all(extra):
                    return None
                values += itertools.chain(*extra)  # type: ignore[arg-type]
        if not self._accepts(rule, edge, values):
            return None
        result = Computed(function, values, edge.dtype, _precision(rule, edge, values[0]), rule.cost)
        result.rounded = rule.exactness == "rounding" or any(each.rounded for each in values)
        result.clipped = any(each.clipped for each in values)
        return _registered(edge, result)

    def _accepts(self, rule: Rule, edge: Edge, values: list[Value]) -> bool:
        """Whether an output is to be computed from these inputs."""
        if rule.exactness == "rounding" and self.need.exact and values[1].dtype != torch.float32:
            return False  # statistics in bf16: the rows would be off by more than rounding
        if is_float8(edge.dtype) and any(value.lossy for value in values):
            return False  # the codes' errors would round to the next float8 value, 6 % or 12 % away
        # A later layer's backward pass may ask when the memory is empty. A cast is autocast's, for the layer itself.
        if any(value.managed for value in values) and operation(edge.node) != "ToCopyBackward0":
            return False
        return all(value.fresh() for value in values)

    def _without_graph(self, rule: Rule, node: Any, source: Edge | None, i: int) -> list[Value] | None:
        """Argument i of an operation: a leaf as it was when the node was built, or what the node has saved of it.

        None if neither is known; [] for an argument that was not given.
        """
        attribute = rule.inputs[i] if rule.inputs is not None and i < len(rule.inputs) else ""
        found = saved_by(node, attribute.removeprefix("*")) if attribute else None
        if source is None:
            return found if found or attribute.startswith("*") else None
        if found and not isinstance(found[0], Leaf):
            return found if found[0].fresh() else None
        leaf = _unchanged(source.node.variable, node)
        return None if leaf is None else [leaf]


def _unchanged(leaf: Tensor, node: Any) -> Leaf | None:
    """The leaf as it was when a node was built, if it certainly still is."""
    return Leaf(leaf).as_it_is() if leaves.unchanged_since(leaf, node) else None


def _registered(edge: Edge, value: Computed) -> Computed | None:
    """Registers a value, unless it is too far from what is stored."""
    if value.functions > MOST_FUNCTIONS or value.steps > _MOST_STEPS:
        return None
    register(edge, value)
    return value


def _function(rule: Rule, edge: Edge) -> Callable[..., Tensor] | None:
    """The function that recomputes an edge; None where the rule is not for it."""
    return made(rule.make, edge)


def made(make: Callable[[Edge], Callable[..., Tensor] | None], edge: Edge) -> Callable[..., Tensor] | None:
    """What a rule makes of an edge; None, too, where its node is freed: a backward pass has run through it."""
    try:
        return make(edge)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None


def _composition(views: list[Edge]) -> Callable[..., Tensor] | None:
    """Views, each of them of the next one of the list, as one function."""
    functions: list[Callable[..., Tensor]] = []
    for view in reversed(views):
        if (function := _function(RULES[operation(view.node)], view)) is None:
            return None
        functions.append(function)
    return functions[0] if len(functions) == 1 else _Composed(functions)


class _Composed:
    """Functions of one tensor, the first one applied first."""

    __slots__ = ("functions",)

    def __init__(self, functions: list[Callable[..., Tensor]]) -> None:
        self.functions = functions

    def __call__(self, x: Tensor) -> Tensor:
        for function in self.functions:
            x = function(x)
        return x


def _is_lost(source: Edge | None) -> bool:
    """Whether nothing stored can give an input: neither it nor what it is a view of is stored or has a rule."""
    while source is not None and not is_leaf(source.node) and registered(source) is None:
        rule = RULES.get(operation(source.node))
        if rule is None:
            return True
        if rule.kind != Kind.VIEW:
            return False
        source = source.inputs()[0]
    return False


def _needed(rule: Rule, edge: Edge, source: Edge, dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype to which an input must be precise for an output that is precise to ``dtype``."""
    if rule.kind == Kind.FUNCTION:
        return None
    dtype = dtype or edge.dtype
    return None if finer(dtype, source.dtype) else dtype


def _precision(rule: Rule, edge: Edge, source: Value) -> torch.dtype:
    if rule.kind == Kind.FUNCTION:
        return edge.dtype
    coarser = edge.dtype if finer(source.dtype, edge.dtype) else source.dtype
    return edge.dtype if finer(source.precision, coarser) else source.precision
