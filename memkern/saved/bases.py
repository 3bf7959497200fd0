"""The base of a tensor: what it is a view or a copy of, up the graph, and the operation that made that."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from . import bounded, codecs
from .codecs import Codec
from .edge import Edge
from .rules import CODEC_BY_MAKER, RULES, Kind, shaped, signed, transposed
from .saved_value import finer, is_float8
from .users import is_leaf, operation


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
    # fp16 and bf16 hold no other's values
    return x.to(source.dtype) if finer(x.dtype, source.dtype) else None


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


def base(edge: Edge, x: Tensor, views_only: bool) -> tuple[Edge, Tensor]:
    """The furthest edge up the graph whose whole value ``x`` holds, and ``x`` in its shape."""
    while (back := _BACK.get(name := operation(edge.node))) is not None:
        if views_only and RULES[name].kind != Kind.VIEW:
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


CODECS = {codec.name: codec for codec in (codecs.POWER, codecs.UNSIGNED, *bounded.CODECS)}
"""All codecs of what needs a gradient, by the names that CODEC_BY_MAKER gives them."""
SEEN_THROUGH = {name for name, rule in RULES.items() if rule.kind == Kind.VIEW} | {
    "CloneBackward0",
    "ToCopyBackward0",
}


def maker(edge: Edge) -> str:
    """The operation that computed the data of an edge, behind views and copies; "" if the graph does not show it."""
    while (name := operation(edge.node)) in SEEN_THROUGH:
        source = edge.inputs()[0]
        if source is None:
            return ""
        edge = source
    return name


COPIES = {name for name, rule in RULES.items() if rule.kind != Kind.FUNCTION}


def is_copy(edge: Edge) -> bool:
    """Whether an edge is a view, a cast, a copy or a lookup of another's values."""
    return operation(edge.node) in COPIES


def codec_of(edge: Edge) -> Codec | None:
    """The codes for the data of an edge, by the operation that computed them; None: no codes."""
    return CODECS.get(CODEC_BY_MAKER.get(maker(edge), ""))
