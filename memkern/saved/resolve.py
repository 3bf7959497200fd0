"""Derives a saved tensor from stored ones, or finds the base tensor to store."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .codecs import BLOCK_SIZE
from .edge import Edge
from .leaves import leaves
from .peek import saved_by
from .rules import CODEC_BY_MAKER, MOST_FUNCTIONS, RULES, Rule, shaped, signed, transposed
from .saved_value import Computed, Leaf, Value, register, registered
from .users import is_leaf, operation

_LONGEST = 40
"""Rules that are tried, and values that are computed, one after another, views and copies among them: each recurs."""


@functools.cache
def finer(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether every value of dtype ``b`` is one of ``a``."""
    if a == b or not is_float8(a, b):
        return a == b or torch.promote_types(a, b) == a
    if a.itemsize == 1 or not a.is_floating_point:
        return False  # no float8 holds all of another
    one, other = torch.finfo(a), torch.finfo(b)  # torch promotes no float8
    return one.max >= other.max and one.smallest_normal * one.eps <= other.smallest_normal


def is_float8(*dtypes: torch.dtype) -> bool:
    return any(dtype.is_floating_point and dtype.itemsize == 1 for dtype in dtypes)


class Resolver:
    """Derives the value of an edge from values that are stored.

    exact: no value with codes in it. views_only: stored values and views of them only.
    rounded: also values that are recomputed to within rounding, such as the rows of norms.
    shape: the user reads the shape alone, so any codes do. copies_only: views, casts and copies only.
    beside_codes: the session stores other values in codes. coarse: also codes that lose most of a block.
    block_size: the largest of codes.
    """

    def __init__(
        self,
        exact: bool,
        views_only: bool,
        rounded: bool = True,
        shape: bool = False,
        copies_only: bool = False,
        beside_codes: bool = False,
        coarse: bool = True,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self.exact, self.views_only, self.rounded, self.shape = exact, views_only, rounded, shape
        self.copies_only, self.beside_codes, self.coarse = copies_only, beside_codes, coarse
        self.block_size = block_size
        self.failed: dict[tuple[Any, int, torch.dtype | None], int] = {}  # and how many functions were left

    def good(self, value: Value, need: torch.dtype | None) -> bool:
        return (
            value.fresh()
            and not (self.exact and value.lossy)
            and (self.rounded or not value.rounded)
            and (self.shape or not value.clipped)
            and (self.coarse or not value.coarse)
            and value.block_size <= self.block_size
            and (value.lossy or finer(value.precision, need or value.dtype))
        )

    def resolve(
        self, edge: Edge, need: torch.dtype | None, left: int = _LONGEST, functions: int = MOST_FUNCTIONS
    ) -> Value | None:
        """The value of an edge, precise to dtype ``need`` (None: its own); None if no stored value gives it.

        left: rules that may be tried one after another; functions: those among them that compute something.
        """
        value = registered(edge)
        if (
            value is not None
            and self.good(value, need)
            and not (self.views_only and isinstance(value, Computed))
        ):
            if self.exact:
                value.stay_exact()
            return value
        rule = RULES.get(operation(edge.node))
        if rule is None or left == 0 or functions < rule.cost or (self.views_only and rule.kind != "view"):
            return None
        if self.failed and functions <= self.failed.get((edge.node, edge.nr, need), -1):
            return None
        if rule.kind == "view":
            value = self._see_through(edge, need, left, functions)
        elif (
            (self.copies_only and rule.kind == "function")
            or (rule.uncoded and self.beside_codes)
            or (rule.exactness == "rounding" and not self.rounded)
        ):
            return None
        else:
            value = self._apply(rule, edge, need, left, functions - rule.cost)
        if value is None:
            self.failed[edge.node, edge.nr, need] = functions
        return value

    def _see_through(self, edge: Edge, need: torch.dtype | None, left: int, functions: int) -> Value | None:
        """A chain of views, as one function of the tensor that they are views of, whose dtype and device they have."""
        views = [edge]
        value: Value | None
        while True:
            node, nr = views[-1].node.next_functions[0]
            if node is None:
                return None
            if is_leaf(node):
                value = self._unchanged(node.variable, views[-1].node)
                break
            source = Edge(node, nr)
            rule = RULES.get(operation(node))
            if rule is None or rule.kind != "view" or len(views) == left or registered(source) is not None:
                value = self.resolve(source, need, left - len(views), functions)
                break
            views.append(source)
        if value is None or (function := _composition(views)) is None:
            return None
        precision = value.dtype if finer(value.precision, value.dtype) else value.precision
        seen = Computed(function, (value,), value.dtype, precision, 0)
        seen.rounded, seen.clipped = value.rounded, value.clipped
        if seen.length > _LONGEST:
            return None
        register(edge, seen)
        return seen

    def _apply(
        self, rule: Rule, edge: Edge, need: torch.dtype | None, left: int, functions: int
    ) -> Value | None:
        sources = edge.inputs()
        # Before the way up of the others is tried: of a sum of many layers that would be the whole model.
        if len(sources) > 1 and any(map(_is_lost, sources)):
            return None
        if (function := _function(rule, edge)) is None:
            return None
        values: list[Value] = []
        for i, source in enumerate(sources):
            if source is None:
                found = self._without_edge(rule, edge.node, i)
            elif is_leaf(source.node):
                found = self._leaf(rule, edge.node, source.node.variable, i)
            else:
                value = self.resolve(source, _needed(rule, edge, source, need), left - 1, functions)
                found = None if value is None else [value]
            if found is None:
                return None
            values += found
            for attribute in rule.extra if i == 0 else ():
                if not (found := saved_by(edge.node, attribute)):
                    return None
                values += found
        if rule.exactness == "rounding" and self.exact and values[1].dtype != torch.float32:
            return None  # statistics in bf16: the rows would be off by more than rounding
        if not all(value.fresh() for value in values):
            return None
        if is_float8(edge.dtype) and any(value.lossy for value in values):
            return None  # the codes' errors would round to the next float8 value, 6 % or 12 % away
        # A later layer's backward pass may ask when the memory is empty. A cast is autocast's, for the layer itself.
        if any(value.managed for value in values) and operation(edge.node) != "ToCopyBackward0":
            return None
        value = Computed(function, values, edge.dtype, _precision(rule, edge, values[0]), rule.cost)
        value.rounded = rule.exactness == "rounding" or any(each.rounded for each in values)
        value.clipped = any(each.clipped for each in values)
        if value.depth > MOST_FUNCTIONS or value.length > _LONGEST:
            return None
        register(edge, value)
        return value

    def _leaf(self, rule: Rule, node: Any, leaf: Tensor, i: int) -> list[Value] | None:
        """A leaf with the value that it had when the node was built; None if its version then is not known."""
        attribute = rule.inputs[i] if rule.inputs is not None and i < len(rule.inputs) else ""
        found = saved_by(node, attribute.removeprefix("*")) if attribute else None
        if found and not isinstance(found[0], Leaf):
            return found if found[0].fresh() else None
        value = self._unchanged(leaf, node)
        return None if value is None else [value]

    def _unchanged(self, leaf: Tensor, node: Any) -> Leaf | None:
        return Leaf(leaf).as_it_is() if leaves.unchanged_since(leaf, node) else None

    def _without_edge(self, rule: Rule, node: Any, i: int) -> list[Value] | None:
        """An argument that needs no gradient, as the node saved it; None if it did not."""
        attribute = rule.inputs[i] if rule.inputs is not None and i < len(rule.inputs) else ""
        found = saved_by(node, attribute.removeprefix("*")) if attribute else None
        return found if found or attribute.startswith("*") else None


def _function(rule: Rule, edge: Edge) -> Callable[..., Tensor] | None:
    """The function that recomputes an edge; None where the rule is not for it."""
    try:
        return rule.make(edge)
    except RuntimeError:  # the node is freed: a backward pass has run through it
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
        if rule.kind != "view":
            return False
        source = source.inputs()[0]
    return False


def _needed(rule: Rule, edge: Edge, source: Edge, need: torch.dtype | None) -> torch.dtype | None:
    """The dtype to which an input must be precise for an output that is precise to ``need``."""
    if rule.kind == "function":
        return None
    need = need or edge.dtype
    return None if finer(need, source.dtype) else need


def _precision(rule: Rule, edge: Edge, source: Value) -> torch.dtype:
    if rule.kind == "function":
        return edge.dtype
    coarser = edge.dtype if finer(source.dtype, edge.dtype) else source.dtype
    return edge.dtype if finer(source.precision, coarser) else source.precision


# ---- the base tensor to store


def _viewed(edge: Edge, source: Edge, x: Tensor) -> Tensor | None:
    return x.view(source.shape)


def _back_transposed(edge: Edge, source: Edge, x: Tensor) -> Tensor | None:
    return transposed(edge)(x)


def _back_permuted(edge: Edge, source: Edge, x: Tensor) -> Tensor | None:
    dims = [signed(dim) % x.dim() for dim in edge.node._saved_dims]
    return x.permute([dims.index(i) for i in range(len(dims))])


def _unexpanded(edge: Edge, source: Edge, x: Tensor) -> Tensor | None:
    x = x[(0,) * (x.dim() - len(source.shape))]
    for dim, size in enumerate(source.shape):
        if size != x.shape[dim]:
            x = x.narrow(dim, 0, size)
    return x


def _itself(edge: Edge, source: Edge, x: Tensor) -> Tensor | None:
    return x


def _before_the_cast(edge: Edge, source: Edge, x: Tensor) -> Tensor | None:
    if source.device != x.device or not source.dtype.is_floating_point or is_float8(x.dtype):
        return None  # float8 is coarser than codes, which the source may have for other users
    # Of a coarser dtype: its values, in it, so that nobody further up takes them for those of a finer one.
    if finer(source.dtype, x.dtype):
        return x
    return (
        x.to(source.dtype) if finer(x.dtype, source.dtype) else None
    )  # fp16 and bf16 hold no other's values


_BACK: dict[str, Callable[[Edge, Edge, Tensor], Tensor | None]] = {
    **dict.fromkeys((name for name, rule in RULES.items() if rule.make is shaped), _viewed),
    "TBackward0": lambda edge, source, x: x.t(),
    "TransposeBackward0": _back_transposed,
    "PermuteBackward0": _back_permuted,
    "ExpandBackward0": _unexpanded,
    "CloneBackward0": _itself,
    "ToCopyBackward0": _before_the_cast,
}
"""By operation: from its output, a view or copy of the whole input, back to the input, as a view."""


def root(edge: Edge, x: Tensor, views_only: bool) -> tuple[Edge, Tensor]:
    """The base: the furthest edge up the graph whose whole value ``x`` holds, and ``x`` in its shape."""
    while (back := _BACK.get(name := operation(edge.node))) is not None:
        if views_only and RULES[name].kind != "view":
            break
        node, nr = edge.node.next_functions[0]
        if node is None or is_leaf(node):
            break
        source = Edge(node, nr)
        try:
            y = back(edge, source, x)
        except (RuntimeError, ValueError):  # not to be viewed so; fake tensors raise the second
            break
        if y is None or y.shape != source.shape:
            break
        edge, x = source, y
    return edge, x


_SEEN_THROUGH = {name for name, rule in RULES.items() if rule.kind == "view"} | {
    "CloneBackward0",
    "ToCopyBackward0",
}


def maker(edge: Edge) -> str:
    """The operation that computed the data of an edge, behind views and copies; "" if the graph does not show it."""
    while (name := operation(edge.node)) in _SEEN_THROUGH:
        source = edge.inputs()[0]
        if source is None:
            return ""
        edge = source
    return name


_COPIES = {name for name, rule in RULES.items() if rule.kind != "function"}


def is_copy(edge: Edge) -> bool:
    """Whether an edge is a view, a cast or a copy of another."""
    return operation(edge.node) in _COPIES


def codec_of(edge: Edge) -> str | None:
    """The name of the codec for the data of an edge; None: no codes."""
    return CODEC_BY_MAKER.get(maker(edge))
