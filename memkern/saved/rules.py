"""Two tables: which values can be recomputed from others, and the codec of those that are stored.

Every node of the autograd graph is one operation that torch has done; its ``next_functions`` are the edges of its
inputs, in the order of its arguments. A rule computes the output from them. Results of an operation without a rule are
not recomputed, and results of an operation that is not in CODEC_BY_MAKER are stored without codes.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..functions.autograd import without_autocast
from ..functions.glu import glu
from .edge import Edge
from .peek import peeking

# ---- for a node's edge, the function that recomputes its output

_MOST_OF_A_SUM = 8  # elements


def signed(dim: int) -> int:
    """Nodes show negative dimensions as unsigned 64-bit numbers."""
    return dim - (1 << 64) if dim >= 1 << 63 else dim


class _Shaped:
    """Reshapes its argument: one object for the garbage collector, where a lambda with its closure is three."""

    __slots__ = ("shape",)

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape

    def __call__(self, x: Tensor) -> Tensor:
        return x.reshape(self.shape)


def shaped(edge: Edge) -> Callable[[Tensor], Tensor]:
    return _Shaped(edge.shape)


def _cast(edge: Edge) -> Callable[[Tensor], Tensor] | None:
    """To another dtype, but not from another device."""
    source = edge.inputs()[0]
    if source is not None and source.device != edge.device:
        return None
    dtype = edge.dtype
    return lambda x: x.to(dtype)


@functools.cache  # few dimensions, many nodes
def _transposing(first: int, second: int) -> Callable[[Tensor], Tensor]:
    first, second = signed(first), signed(second)
    return lambda x: x.transpose(first, second)


def transposed(edge: Edge) -> Callable[[Tensor], Tensor]:
    return _transposing(edge.node._saved_dim0, edge.node._saved_dim1)


def _permuted(edge: Edge) -> Callable[[Tensor], Tensor]:
    dims = [signed(dim) for dim in edge.node._saved_dims]
    return lambda x: x.permute(dims)


def _expanded(edge: Edge) -> Callable[[Tensor], Tensor]:
    shape = edge.shape
    return lambda x: x.expand(shape)


def _sliced(edge: Edge) -> Callable[[Tensor], Tensor]:
    node = edge.node
    dim, start, end, step = map(signed, (node._saved_dim, node._saved_start, node._saved_end, node._saved_step))
    return lambda x: torch.ops.aten.slice.Tensor(x, dim, start, end, step)


def _split(edge: Edge) -> Callable[[Tensor], Tensor]:
    dim, size, nr = signed(edge.node._saved_dim), edge.node._saved_split_size, edge.nr
    return lambda x: x.narrow(dim, nr * size, min(size, x.shape[dim] - nr * size))


def _split_in_sizes(edge: Edge) -> Callable[[Tensor], Tensor]:
    dim, sizes, nr = signed(edge.node._saved_dim), edge.node._saved_split_sizes, edge.nr
    return lambda x: x.narrow(dim, sum(sizes[:nr]), sizes[nr])


def _selected(edge: Edge) -> Callable[[Tensor], Tensor]:
    dim, index = signed(edge.node._saved_dim), edge.node._saved_index
    return lambda x: x.select(dim, signed(index))


def _unbound(edge: Edge) -> Callable[[Tensor], Tensor]:
    dim, nr = signed(edge.node._saved_dim), edge.nr
    return lambda x: x.select(dim, nr)


def _joined(edge: Edge) -> Callable[..., Tensor]:
    dim = signed(edge.node._saved_dim)
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

    with peeking():
        has_weight = edge.node._saved_weight is not None

    def function(x: Tensor, mean: Tensor, inverse_deviation: Tensor, *affine: Tensor) -> Tensor:
        y = x.float().sub(mean).mul_(inverse_deviation)
        if has_weight:
            y = y.mul_(affine[0])
        if len(affine) > has_weight:
            y = y.add_(affine[-1])
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


def _recomputed(edge: Edge) -> Callable[[Tensor], Tensor]:
    return edge.node.function


def _summed(edge: Edge) -> Callable[[Tensor], Tensor] | None:
    """Over a dimension or more, of few elements: a sum over many is small, and saved as it is."""
    source = edge.inputs()[0]
    if source is None or edge.node._saved_dim is None or source.shape.numel() > _MOST_OF_A_SUM * edge.shape.numel():
        return None
    dims = [signed(dim) for dim in edge.node._saved_dim]
    return functools.partial(torch.sum, dim=dims, keepdim=edge.node._saved_keepdim, dtype=edge.dtype)


def _softmax(edge: Edge) -> Callable[[Tensor], Tensor]:
    return functools.partial(torch.softmax, dim=signed(edge.node._saved_dim), dtype=edge.dtype)


def _safe_softmax(edge: Edge) -> Callable[[Tensor], Tensor]:
    return functools.partial(torch.ops.aten._safe_softmax, dim=signed(edge.node._saved_dim))


def _bmm(edge: Edge) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Of attention's scores, which are larger than queries and keys together; no other product is worth it."""
    sources = edge.inputs()
    if any(source is None for source in sources):
        return None
    if edge.shape.numel() < sum(source.shape.numel() for source in sources if source):
        return None

    def function(a: Tensor, b: Tensor) -> Tensor:
        with without_autocast(a.device):
            return torch.bmm(a, b)

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


class Kind(enum.IntEnum):
    """What an operation's output is: the same memory, the same values elsewhere or in another dtype, or a function."""

    VIEW = 0
    COPY = 1
    FUNCTION = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """How an operation's output follows from its inputs.

    exactness: "bits", the same ones as torch's, or "rounding", within a few units in the last place.
    make: gives, for an edge, the function of the inputs; None where the rule is not for this edge.
    inputs: of each argument, where it is if it has no edge (needs no gradient): the node's attribute, with "*" before
        it if there may be no such argument; "" nowhere; None for any number of arguments, all with edges.
    extra: what else is saved, which the function takes after the first argument.
    uncoded: only where nothing is stored in codes: their errors would grow in an exponential, a product or a difference
        of what is nearly equal.
    """

    kind: Kind
    exactness: str
    make: Callable[[Edge], Callable[..., Tensor] | None]
    inputs: tuple[str, ...] | None = ("",)
    extra: tuple[str, ...] = ()
    uncoded: bool = False

    @property
    def cost(self) -> int:
        """Functions that it computes."""
        return int(self.kind == Kind.FUNCTION)


def _view(make: Callable[[Edge], Callable[..., Tensor]]) -> Rule:
    return Rule(Kind.VIEW, "bits", make)


def _copy(make: Callable[[Edge], Callable[..., Tensor] | None]) -> Rule:
    return Rule(Kind.COPY, "bits", make)


def _function(function: Callable[..., Tensor], *inputs: str) -> Rule:
    return Rule(Kind.FUNCTION, "bits", _same(function), inputs or ("",))


RULES: dict[str, Rule] = {
    # operation: kind, exactness, the function of its inputs
    "AliasBackward0": _view(shaped),
    "ViewBackward0": _view(shaped),
    "UnsafeViewBackward0": _view(shaped),
    "ReshapeAliasBackward0": _view(shaped),
    "UnsqueezeBackward0": _view(shaped),
    "SqueezeBackward0": _view(shaped),
    "SqueezeBackward1": _view(shaped),
    "SqueezeBackward2": _view(shaped),
    "TBackward0": _view(_same(Tensor.t)),
    "TransposeBackward0": _view(transposed),
    "PermuteBackward0": _view(_permuted),
    "ExpandBackward0": _view(_expanded),
    "SliceBackward0": _view(_sliced),
    "SplitBackward0": _view(_split),
    "SplitWithSizesBackward0": _view(_split_in_sizes),
    "SelectBackward0": _view(_selected),
    "UnbindBackward0": _view(_unbound),
    "CloneBackward0": _copy(_same(lambda x: x)),
    "ToCopyBackward0": _copy(_cast),
    # Torch does not save the table: it may be changed before the backward pass, as max_norm does.
    "EmbeddingBackward0": Rule(Kind.COPY, "bits", _rows, ("",), ("_saved_indices",), uncoded=True),
    "IndexBackward0": Rule(Kind.COPY, "bits", _indexed, ("",), ("_saved_indices",)),
    "CatBackward0": Rule(Kind.FUNCTION, "bits", _joined, None),
    "NegBackward0": _function(torch.neg),
    "AddBackward0": Rule(Kind.FUNCTION, "bits", _scaled(torch.add), ("", "")),
    "SubBackward0": Rule(Kind.FUNCTION, "bits", _scaled(torch.sub), ("", ""), uncoded=True),
    "MulBackward0": _function(torch.mul, "_saved_self", "_saved_other"),
    "MulBackward1": Rule(Kind.FUNCTION, "bits", _times_number),
    "DivBackward0": _function(torch.div, "_saved_self", "_saved_other"),
    "SiluBackward0": _function(F.silu),
    "GeluBackward0": Rule(Kind.FUNCTION, "bits", _gelu),
    "ReluBackward0": _function(torch.relu),
    "SigmoidBackward0": Rule(Kind.FUNCTION, "bits", _same(torch.sigmoid), uncoded=True),
    "TanhBackward0": Rule(Kind.FUNCTION, "bits", _same(torch.tanh), uncoded=True),
    "MishBackward0": _function(F.mish),
    "HardswishBackward0": _function(F.hardswish),
    "LeakyReluBackward0": Rule(Kind.FUNCTION, "bits", _leaky_relu),
    "memkern.Glu": Rule(Kind.FUNCTION, "bits", _glu, None),
    "memkern.Recompute": Rule(Kind.FUNCTION, "bits", _recomputed),
    "SumBackward1": Rule(Kind.FUNCTION, "bits", _summed, uncoded=True),
    "SoftmaxBackward0": Rule(Kind.FUNCTION, "bits", _softmax, uncoded=True),
    "SafeSoftmaxBackward0": Rule(Kind.FUNCTION, "bits", _safe_softmax, uncoded=True),
    "BmmBackward0": Rule(Kind.FUNCTION, "bits", _bmm, ("", ""), uncoded=True),
    "NativeLayerNormBackward0": Rule(
        Kind.FUNCTION,
        "rounding",
        _layer_norm,
        ("_saved_input", "*_saved_weight", "*_saved_bias"),
        ("_saved_result1", "_saved_result2"),
    ),
    "FusedRmsNormBackward0": Rule(
        Kind.FUNCTION, "rounding", _rms_norm, ("_saved_input", "*_saved_weight"), ("_saved_result1",)
    ),
}
"""How what is saved follows from what is saved already."""

MOST_FUNCTIONS = 12
"""So many one after another are computed anew at most; a value further from what is stored is stored itself."""

POWER, UNSIGNED = "power", "unsigned power"
PROBABILITY, TANH, LOGARITHM = "probability", "tanh", "log-probability"
CODEC_BY_MAKER: dict[str, str] = {
    # matrix products and convolutions
    **dict.fromkeys(("AddmmBackward0", "MmBackward0", "BmmBackward0", "BaddbmmBackward0", "MvBackward0"), POWER),
    **dict.fromkeys(("LinearBackward0", "MkldnnLinearBackward0", "GroupedMmBackward0"), POWER),
    **dict.fromkeys(("ConvolutionBackward0", "MkldnnConvolutionBackward0", "ThnnConv2DBackward0"), POWER),
    "EinsumBackward0": POWER,
    # attention
    "ScaledDotProductFlashAttentionForCpuBackward0": POWER,
    "ScaledDotProductFlashAttentionBackward0": POWER,
    "ScaledDotProductEfficientAttentionBackward0": POWER,
    "ScaledDotProductCudnnAttentionBackward0": POWER,
    **dict.fromkeys(("SoftmaxBackward0", "SafeSoftmaxBackward0", "SigmoidBackward0"), PROBABILITY),
    # norms
    **dict.fromkeys(("NativeLayerNormBackward0", "FusedRmsNormBackward0", "NativeGroupNormBackward0"), POWER),
    **dict.fromkeys(("NativeBatchNormBackward0", "CudnnBatchNormBackward0"), POWER),
    # elementwise
    **dict.fromkeys(("AddBackward0", "AddBackward1", "SubBackward0", "SubBackward1", "NegBackward0"), POWER),
    **dict.fromkeys(("MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1"), POWER),
    **dict.fromkeys(("SiluBackward0", "GeluBackward0", "MishBackward0", "HardswishBackward0"), POWER),
    **dict.fromkeys(("LeakyReluBackward0", "EluBackward0", "CeluBackward0"), POWER),
    **dict.fromkeys(("HardtanhBackward0", "HardsigmoidBackward0", "SoftplusBackward0"), POWER),
    "TanhBackward0": TANH,
    "ReluBackward0": UNSIGNED,
    "NativeDropoutBackward0": POWER,
    # the same values elsewhere
    **dict.fromkeys(("EmbeddingBackward0", "IndexBackward0", "IndexSelectBackward0", "GatherBackward0"), POWER),
    **dict.fromkeys(("CatBackward0", "StackBackward0", "RepeatBackward0", "RollBackward0", "FlipBackward0"), POWER),
    **dict.fromkeys(("ConstantPadNdBackward0", "MaxPool2DWithIndicesBackward0", "AvgPool2DBackward0"), POWER),
    **dict.fromkeys(("UpsampleNearest2DBackward0", "UpsampleBilinear2DBackward0"), POWER),
    # of :mod:`memkern.functional`
    "memkern.FewBit": POWER,
    **dict.fromkeys(("memkern.Glu", "memkern.Recompute"), POWER),
    "LogSoftmaxBackward0": LOGARITHM,
}
"""In which codes a value is stored, by the operation that made it; whether it is, its users decide (users.py)."""
