"""Which saved tensors are made of which others: the table, and how a value is found by it.

Every node of the autograd graph is one operation that torch has done; its ``next_functions`` are the edges of its
inputs, in the order of its arguments. A rule says how the output follows from them. What no rule names is not
recomputed, and what is not in CODED keeps no codes: it is saved as torch does.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .glu import glu
from .values import Computed, Edge, Leaf, Number, Value, register, registered

# ---- functions of a node: what computes the output anew


def _signed(dim: int) -> int:
    """Nodes show negative dimensions as unsigned 64-bit numbers."""
    return dim - (1 << 64) if dim >= 1 << 63 else dim


def _shaped(edge: Edge) -> Callable[[Tensor], Tensor]:
    shape = edge.shape
    return lambda x: x.reshape(shape)


def _cast(edge: Edge) -> Callable[[Tensor], Tensor]:
    dtype = edge.dtype
    return lambda x: x.to(dtype)


def _transposed(edge: Edge) -> Callable[[Tensor], Tensor]:
    first, second = _signed(edge.node._saved_dim0), _signed(edge.node._saved_dim1)
    return lambda x: x.transpose(first, second)


def _permuted(edge: Edge) -> Callable[[Tensor], Tensor]:
    dims = [_signed(dim) for dim in edge.node._saved_dims]
    return lambda x: x.permute(dims)


def _expanded(edge: Edge) -> Callable[[Tensor], Tensor]:
    shape = edge.shape
    return lambda x: x.expand(shape)


def _sliced(edge: Edge) -> Callable[[Tensor], Tensor]:
    node = edge.node
    dim, start, end, step = _signed(node._saved_dim), node._saved_start, node._saved_end, node._saved_step
    return lambda x: torch.ops.aten.slice.Tensor(x, dim, start, end, step)


def _split(edge: Edge) -> Callable[[Tensor], Tensor]:
    dim, size, nr = _signed(edge.node._saved_dim), edge.node._saved_split_size, edge.nr
    return lambda x: x.narrow(dim, nr * size, min(size, x.shape[dim] - nr * size))


def _split_in_sizes(edge: Edge) -> Callable[[Tensor], Tensor]:
    dim, sizes, nr = _signed(edge.node._saved_dim), edge.node._saved_split_sizes, edge.nr
    return lambda x: x.narrow(dim, sum(sizes[:nr]), sizes[nr])


def _selected(edge: Edge) -> Callable[[Tensor], Tensor]:
    dim, index = _signed(edge.node._saved_dim), edge.node._saved_index
    return lambda x: x.select(dim, _signed(index))


def _unbound(edge: Edge) -> Callable[[Tensor], Tensor]:
    dim, nr = _signed(edge.node._saved_dim), edge.nr
    return lambda x: x.select(dim, nr)


def _joined(edge: Edge) -> Callable[..., Tensor]:
    dim = _signed(edge.node._saved_dim)
    return lambda *parts: torch.cat(parts, dim)


def _scaled(function: Callable[..., Tensor]) -> Callable[[Edge], Callable[..., Tensor]]:
    """x + alpha * y, x - alpha * y."""
    return lambda edge: functools.partial(function, alpha=edge.node._saved_alpha)


def _times_number(edge: Edge) -> Callable[[Tensor], Tensor]:
    number = edge.node._saved_other
    return lambda x: x * number


def _gelu(edge: Edge) -> Callable[[Tensor], Tensor]:
    return functools.partial(F.gelu, approximate=edge.node._saved_approximate)


def _leaky_relu(edge: Edge) -> Callable[[Tensor], Tensor]:
    return functools.partial(F.leaky_relu, negative_slope=edge.node._saved_negative_slope)


def _layer_norm(edge: Edge) -> Callable[..., Tensor]:
    dtype = edge.dtype

    def function(x: Tensor, mean: Tensor, inverse_deviation: Tensor, *affine: Tensor) -> Tensor:
        y = x.float().sub(mean).mul_(inverse_deviation)
        if affine:
            y = y.mul_(affine[0])
        if len(affine) > 1:
            y = y.add_(affine[1])
        return y.to(dtype)

    return function


def _rms_norm(edge: Edge) -> Callable[..., Tensor]:
    dtype = edge.dtype

    def function(x: Tensor, inverse: Tensor, *weight: Tensor) -> Tensor:
        y = x.float().mul(inverse)
        return (y.mul_(weight[0]) if weight else y).to(dtype)

    return function


def _glu(edge: Edge) -> Callable[..., Tensor]:
    activation = edge.node.activation

    def function(gate: Tensor, up: Tensor | None = None) -> Tensor:
        return glu(gate, up, activation)

    return function


def _rows(edge: Edge) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda weight, indices: F.embedding(indices, weight)


def _indexed(edge: Edge) -> Callable[..., Tensor]:
    with peeking():
        given = [index is not None for index in edge.node._saved_indices]

    def function(x: Tensor, *indices: Tensor) -> Tensor:
        left = iter(indices)
        return x[tuple(next(left) if is_given else slice(None) for is_given in given)]

    return function


def _same(function: Callable[..., Tensor]) -> Callable[[Edge], Callable[..., Tensor]]:
    return lambda edge: function


# ---- the table


class Rule(NamedTuple):
    """How an operation's output follows from its inputs.

    kind: "view" (the same memory), "copy" (the same values elsewhere or in another dtype) or "function".
    exactness: "bits", the same ones as torch's, or "rounding", within a few units in the last place.
    make: gives, for an edge, the function of the inputs.
    inputs: of each argument, where it is if it has no edge (needs no gradient): the node's attribute, with "*" before
        it if there may be no such argument; "" nowhere; None for any number of arguments, all with edges.
    extra: what else is saved, which the function takes after the first argument.
    """

    kind: str
    exactness: str
    make: Callable[[Edge], Callable[..., Tensor]]
    inputs: tuple[str, ...] | None = ("",)
    extra: tuple[str, ...] = ()

    @property
    def cost(self) -> int:
        return int(self.kind == "function")


def _view(make: Callable[[Edge], Callable[..., Tensor]]) -> Rule:
    return Rule("view", "bits", make)


def _copy(make: Callable[[Edge], Callable[..., Tensor]]) -> Rule:
    return Rule("copy", "bits", make)


def _function(function: Callable[..., Tensor], *inputs: str) -> Rule:
    return Rule("function", "bits", _same(function), inputs or ("",))


RULES: dict[str, Rule] = {
    # operation: kind, exactness, the function of its inputs
    "AliasBackward0": _view(_shaped),
    "ViewBackward0": _view(_shaped),
    "UnsafeViewBackward0": _view(_shaped),
    "ReshapeAliasBackward0": _view(_shaped),
    "UnsqueezeBackward0": _view(_shaped),
    "SqueezeBackward0": _view(_shaped),
    "SqueezeBackward1": _view(_shaped),
    "SqueezeBackward2": _view(_shaped),
    "TBackward0": _view(_same(Tensor.t)),
    "TransposeBackward0": _view(_transposed),
    "PermuteBackward0": _view(_permuted),
    "ExpandBackward0": _view(_expanded),
    "SliceBackward0": _view(_sliced),
    "SplitBackward0": _view(_split),
    "SplitWithSizesBackward0": _view(_split_in_sizes),
    "SelectBackward0": _view(_selected),
    "UnbindBackward0": _view(_unbound),
    "CloneBackward0": _copy(_same(lambda x: x)),
    "ToCopyBackward0": _copy(_cast),
    "EmbeddingBackward0": Rule("copy", "bits", _rows, ("",), ("_saved_indices",)),
    "IndexBackward0": Rule("copy", "bits", _indexed, ("",), ("_saved_indices",)),
    "CatBackward0": Rule("function", "bits", _joined, None),
    "NegBackward0": _function(torch.neg),
    "AddBackward0": Rule("function", "bits", _scaled(torch.add), ("", "")),
    "SubBackward0": Rule("function", "bits", _scaled(torch.sub), ("", "")),
    "MulBackward0": _function(torch.mul, "_saved_self", "_saved_other"),
    "MulBackward1": Rule("function", "bits", _times_number),
    "DivBackward0": _function(torch.div, "_saved_self", "_saved_other"),
    "SiluBackward0": _function(F.silu),
    "GeluBackward0": Rule("function", "bits", _gelu),
    "ReluBackward0": _function(torch.relu),
    "SigmoidBackward0": _function(torch.sigmoid),
    "TanhBackward0": _function(torch.tanh),
    "MishBackward0": _function(F.mish),
    "HardswishBackward0": _function(F.hardswish),
    "LeakyReluBackward0": Rule("function", "bits", _leaky_relu),
    "GluBackward": Rule("function", "bits", _glu, None),
    "NativeLayerNormBackward0": Rule(
        "function",
        "rounding",
        _layer_norm,
        ("_saved_input", "*_saved_weight", "*_saved_bias"),
        ("_saved_result1", "_saved_result2"),
    ),
    "FusedRmsNormBackward0": Rule(
        "function", "rounding", _rms_norm, ("_saved_input", "*_saved_weight"), ("_saved_result1",)
    ),
}
"""How what is saved follows from what is saved already."""

MOST_FUNCTIONS = 12
"""So many one after another are computed anew at most; a value further from what is stored is stored itself."""
_LONGEST = 40  # rules that are tried one after another, views and copies among them

POWER, UNSIGNED, AFFINE = "power", "unsigned power", "affine"
CODED: dict[str, str] = {
    # matrix products and convolutions
    **dict.fromkeys(
        ("AddmmBackward0", "MmBackward0", "BmmBackward0", "BaddbmmBackward0", "MvBackward0"), POWER
    ),
    **dict.fromkeys(("LinearBackward0", "MkldnnLinearBackward0", "GroupedMmBackward0"), POWER),
    **dict.fromkeys(("ConvolutionBackward0", "MkldnnConvolutionBackward0", "ThnnConv2DBackward0"), POWER),
    "EinsumBackward0": POWER,
    # attention
    "ScaledDotProductFlashAttentionForCpuBackward0": POWER,
    "ScaledDotProductFlashAttentionBackward0": POWER,
    "ScaledDotProductEfficientAttentionBackward0": POWER,
    "ScaledDotProductCudnnAttentionBackward0": POWER,
    **dict.fromkeys(("SoftmaxBackward0", "SafeSoftmaxBackward0"), UNSIGNED),
    # norms
    **dict.fromkeys(("NativeLayerNormBackward0", "FusedRmsNormBackward0", "NativeGroupNormBackward0"), POWER),
    **dict.fromkeys(("NativeBatchNormBackward0", "CudnnBatchNormBackward0"), POWER),
    # elementwise
    **dict.fromkeys(("AddBackward0", "AddBackward1", "SubBackward0", "SubBackward1", "NegBackward0"), POWER),
    **dict.fromkeys(("MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1"), POWER),
    **dict.fromkeys(("SiluBackward0", "GeluBackward0", "MishBackward0", "HardswishBackward0"), POWER),
    **dict.fromkeys(("LeakyReluBackward0", "EluBackward0", "TanhBackward0"), POWER),
    **dict.fromkeys(("ReluBackward0", "SigmoidBackward0"), UNSIGNED),
    "NativeDropoutBackward0": POWER,
    # the same values elsewhere
    **dict.fromkeys(
        ("EmbeddingBackward0", "IndexBackward0", "IndexSelectBackward0", "GatherBackward0"), POWER
    ),
    **dict.fromkeys(
        ("CatBackward0", "StackBackward0", "RepeatBackward0", "RollBackward0", "FlipBackward0"), POWER
    ),
    **dict.fromkeys(("ConstantPadNdBackward0", "MaxPool2DWithIndicesBackward0", "AvgPool2DBackward0"), POWER),
    **dict.fromkeys(("UpsampleNearest2DBackward0", "UpsampleBilinear2DBackward0"), POWER),
    # of :mod:`memkern.functional`
    **dict.fromkeys(("CodesBackward", "OutputBackward", "WrappedBackward", "GluBackward"), POWER),
    "LogSoftmaxBackward0": AFFINE,
}
"""What is stored in 8 bits, by the operation that made it, and how.

Not here, and so saved as torch does: what divides or goes through a logarithm elsewhere (exp, sqrt, rsqrt, pow, sums,
means, norms), where a small value that becomes 0 would become an infinite gradient.
"""

_ACCUMULATE = "torch::autograd::AccumulateGrad"


# ---- constants: what a node saves that needs no gradient


_local = threading.local()


@contextlib.contextmanager
def peeking() -> Iterator[list[Value]]:
    """Inside, what autograd asks the unpack hook for is noted and not computed."""
    found: list[Value] = []
    _local.found = found
    try:
        yield found
    finally:
        _local.found = None


def peeked(value: Value) -> bool:
    """For the unpack hook: notes the value and says True if it is only to be noted."""
    found = getattr(_local, "found", None)
    if found is None:
        return False
    found.append(value)
    return True


def saved_by(node: Any, attribute: str) -> list[Value] | None:
    """The values of what a node has saved; [] where that is None, None where it is freed or unknown."""
    with peeking() as found:
        try:
            shown = getattr(node, attribute)
        except (RuntimeError, AttributeError):  # freed, or another version of torch
            return None
    if shown is None or found:
        return found
    # Autograd packs no numbers.
    return [Number(shown)] if isinstance(shown, Tensor) and shown.dim() == 0 else None


# ---- resolution


def finer(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether every value of dtype ``b`` is one of ``a``."""
    return torch.promote_types(a, b) == a


class Resolver:
    """Finds of what a saved tensor is made.

    exact: values with codes in them are not good enough. views_only: only what is stored, and views of it.
    """

    def __init__(self, exact: bool, views_only: bool) -> None:
        self.exact, self.views_only = exact, views_only
        self.failed: set[tuple[Any, int, torch.dtype]] = set()

    def good(self, value: Value | None, need: torch.dtype) -> bool:
        return (
            value is not None
            and value.fresh()
            and not (self.exact and value.lossy)
            and (value.lossy or finer(value.precision, need))
        )

    def resolve(self, edge: Edge, need: torch.dtype, left: int = _LONGEST) -> Value | None:
        """The value at an edge, right to ``need``; None where it cannot be had from what is saved."""
        value = registered(edge)
        if self.good(value, need) and not (self.views_only and isinstance(value, Computed)):
            return value
        name = edge.node.name()
        if name == _ACCUMULATE:
            return Leaf(edge.node.variable)
        rule = RULES.get(name)
        key = (edge.node, edge.nr, need)
        if rule is None or left == 0 or (self.views_only and rule.kind != "view") or key in self.failed:
            return None
        value = self._apply(rule, edge, need, left)
        if value is None:
            self.failed.add(key)
        return value

    def _apply(self, rule: Rule, edge: Edge, need: torch.dtype, left: int) -> Value | None:
        values: list[Value] = []
        for i, source in enumerate(edge.inputs()):
            if source is None:
                found = self._without_edge(rule, edge.node, i)
            elif source.device != edge.device:
                found = None
            else:
                value = self.resolve(source, _needed(rule, source, need), left - 1)
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
        value = Computed(rule.make(edge), values, edge.dtype, _precision(rule, edge, values[0]), rule.cost)
        if value.depth > MOST_FUNCTIONS:
            return None
        register(edge, value)
        return value

    def _without_edge(self, rule: Rule, node: Any, i: int) -> list[Value] | None:
        """An argument that needs no gradient, if the node has saved it."""
        attribute = rule.inputs[i] if rule.inputs is not None and i < len(rule.inputs) else ""
        found = saved_by(node, attribute.removeprefix("*")) if attribute else None
        return found if found or attribute.startswith("*") else None


def _needed(rule: Rule, source: Edge, need: torch.dtype) -> torch.dtype:
    """To which dtype an input must be right for an output that is right to ``need``."""
    return source.dtype if rule.kind == "function" or finer(need, source.dtype) else need


def _precision(rule: Rule, edge: Edge, source: Value) -> torch.dtype:
    coarser = edge.dtype if finer(source.dtype, edge.dtype) else source.dtype
    right = rule.kind == "function" or finer(source.precision, coarser)
    return edge.dtype if right else source.precision


# ---- where a tensor that has to be stored belongs


def _viewed(edge: Edge, source: Edge, x: Tensor) -> Tensor | None:
    return x.view(source.shape)


def _back_transposed(edge: Edge, source: Edge, x: Tensor) -> Tensor | None:
    return _transposed(edge)(x)


def _back_permuted(edge: Edge, source: Edge, x: Tensor) -> Tensor | None:
    dims = [_signed(dim) % x.dim() for dim in edge.node._saved_dims]
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
    return x if source.device == x.device and source.dtype.is_floating_point else None


_BACK: dict[str, Callable[[Edge, Edge, Tensor], Tensor | None]] = {
    **dict.fromkeys((name for name, rule in RULES.items() if rule.make is _shaped), _viewed),
    "TBackward0": lambda edge, source, x: x.t(),
    "TransposeBackward0": _back_transposed,
    "PermuteBackward0": _back_permuted,
    "ExpandBackward0": _unexpanded,
    "CloneBackward0": _itself,
    "ToCopyBackward0": _before_the_cast,
}
"""From a view or copy of everything back to what it was made of, as a view."""


def root(edge: Edge, x: Tensor, views_only: bool) -> tuple[Edge, Tensor]:
    """The edge furthest up of which ``x`` holds all there is, and the data seen from there."""
    while (back := _BACK.get(name := edge.node.name())) is not None:
        if views_only and RULES[name].kind != "view":
            break
        source = edge.inputs()[0]
        if source is None or source.node.name() == _ACCUMULATE:
            break
        try:
            y = back(edge, source, x)
        except RuntimeError:  # not to be viewed so
            break
        if y is None or y.shape != source.shape:
            break
        edge, x = source, y
    return edge, x


_SEEN_THROUGH = {name for name, rule in RULES.items() if rule.kind == "view"} | {
    "CloneBackward0",
    "ToCopyBackward0",
}


def codec_of(edge: Edge) -> str | None:
    """How the data of an edge is coded: by the operation that made it, views left aside."""
    while edge.node.name() in _SEEN_THROUGH:
        source = edge.inputs()[0]
        if source is None:
            return None
        edge = source
    return CODED.get(edge.node.name())
